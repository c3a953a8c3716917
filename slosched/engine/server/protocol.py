"""Parsing and checks of the bodies that clients send to the two generation endpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slosched.core import SamplingParams
from slosched.engine.server.call_form import CallForm
from slosched.engine.server.errors import ApiError
from slosched.engine.server.fields import (
    STREAM_FIELDS,
    STRUCTURED_FIELDS,
    check_fields,
)
from slosched.engine.server.logprobs import parse_num_logprobs, parse_num_prompt_logprobs
from slosched.engine.server.structured import StructuredOutput, parse_structured_output
from slosched.engine.server.tokenizer import TemplateOptions, Tokenizer
from slosched.engine.server.tools import Tools, parse_tools
from slosched.engine.server.values import (
    Body,
    check_vocabulary,
    flag,
    integer,
    mapping,
    number,
    strings,
    token_ids,
    wrong,
)
from slosched.workload.request import MOST_SEQUENCES

_MAX_STOPS = 16
_MAX_BAD_WORDS = 64
_MAX_STOP_CHARS = 512
_MAX_BAD_WORD_CHARS = 64
_MAX_STOP_TOKEN_IDS = 128
_MAX_TEMPERATURE = 100.0
"""At this temperature all tokens are as likely as each other, but for a few percent."""
_MAX_BIASES, _MAX_BIAS, _MAX_ID_DIGITS = 1024, 100.0, 18
_MAX_PENALTY = 2.0
_REPETITION_PENALTIES = (0.01, 100.0)
_MAX_BEAMS = 16
_MAX_LENGTH_PENALTY = 10.0
_NOT_WITH_BEAMS = (
    "stream",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "echo",
    "logit_bias",
    "presence_penalty",
    "frequency_penalty",
)
_MIN_SEED, _MAX_SEED = -(2**63), 2**64 - 1
_MIN_PRIORITY, _MAX_PRIORITY = -(2**31), 2**31 - 1


@dataclass(frozen=True, slots=True)
class Options:
    """The settings of a generation, apart from its prompt."""

    num_answers: int
    """How many answers to each prompt the client gets (`n`)."""
    num_candidates: int
    """From how many they are chosen (`best_of`), by the mean log-probability of their tokens."""
    is_beam_search: bool
    """Whether the answers are the `num_answers` likeliest that a beam search finds."""
    length_penalty: float
    """The power of the length by which it divides log-probabilities to compare answers."""
    max_tokens: int | None
    """None if the client set no limit."""
    sampling: SamplingParams
    num_logprobs: int | None
    """How many of the likeliest tokens the client is told at each place, besides the one that is
    drawn; None if it is told none."""
    num_prompt_logprobs: int | None
    """The same for the tokens of the prompt, as vLLM writes them."""
    echoes: bool
    """Whether the prompt stands in front of each answer."""
    has_answer: bool
    """Whether there is an answer at all; else one token is drawn that nobody is told."""
    structured: StructuredOutput | None
    """The grammar that the answer follows, which has yet to be compiled."""
    tools: Tools | None
    """The functions that the answer has to call, or may."""
    stops: tuple[str, ...]
    shows_stop: bool
    """Whether the text includes the stop string or the stop token at which it ended."""
    skips_special_tokens: bool
    returns_token_ids: bool
    priority: int
    cache_salt: str | None
    is_streaming: bool
    include_usage: bool
    continuous_usage: bool
    """Whether every event has the usage so far."""


def parse_options(body: Body, default_temperature: float, tokenizer: Tokenizer) -> Options:
    """Return a body's options; raise ApiError (400) that names a wrong field and its value."""
    stream_options = mapping(body, "stream_options")
    check_fields(stream_options, STREAM_FIELDS, "stream_options.")
    include_usage = flag(stream_options, "include_usage")
    num_answers = integer(body, "n", 1, 1, MOST_SEQUENCES)
    num_candidates = integer(body, "best_of", num_answers, num_answers, MOST_SEQUENCES)
    sampling = _sampling(body, default_temperature, tokenizer)
    if num_candidates > num_answers:
        if flag(body, "stream"):
            raise ApiError(
                400,
                f"best_of={num_candidates} chooses {num_answers} answers when all have ended, so "
                "that it cannot be streamed: leave out stream, or ask for n answers alone",
                param="best_of",
            )
        sampling = replace(sampling, num_logprobs=0)
    if (num_logprobs := parse_num_logprobs(body)) is not None:
        sampling = replace(sampling, num_logprobs=num_logprobs)
    echoes, num_prompt_logprobs = flag(body, "echo"), parse_num_prompt_logprobs(body)
    told = [
        num for num in (num_prompt_logprobs, num_logprobs if echoes else None) if num is not None
    ]
    sampling = replace(sampling, num_prompt_logprobs=max(told, default=None))
    max_tokens, has_answer = _max_tokens(body, echoes=echoes, sampling=sampling)
    tools = parse_tools(body)
    call_form = tokenizer.call_form
    structured = parse_structured_output(body, tools, call_form)
    length_penalty = number(body, "length_penalty", 1.0, -_MAX_LENGTH_PENALTY, _MAX_LENGTH_PENALTY)
    is_beam_search = flag(body, "use_beam_search")
    if is_beam_search:
        _check_beam_search(body, num_answers, num_candidates, structured)
    elif length_penalty != 1:
        raise ApiError(
            400,
            f"length_penalty={length_penalty:g} is for use_beam_search alone; leave it out",
            param="length_penalty",
        )
    return Options(
        num_answers=num_answers,
        num_candidates=num_candidates,
        is_beam_search=is_beam_search,
        length_penalty=length_penalty,
        max_tokens=max_tokens,
        sampling=sampling,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        echoes=echoes,
        has_answer=has_answer,
        structured=structured,
        tools=tools,
        stops=strings(body, "stop", _MAX_STOPS, _MAX_STOP_CHARS),
        shows_stop=flag(body, "include_stop_str_in_output"),
        skips_special_tokens=_skips_special_tokens(body, tools, call_form),
        returns_token_ids=flag(body, "return_token_ids"),
        priority=integer(body, "priority", 0, _MIN_PRIORITY, _MAX_PRIORITY),
        cache_salt=_cache_salt(body),
        is_streaming=flag(body, "stream"),
        include_usage=include_usage,
        continuous_usage=include_usage and flag(stream_options, "continuous_usage_stats"),
    )


def _skips_special_tokens(body: Body, tools: Tools | None, form: CallForm | None) -> bool:
    """Tell whether text lacks special tokens, which it may not if one of them opens calls."""
    if tools is not None and tools.is_optional and form is not None and form.is_special:
        return False
    return flag(body, "skip_special_tokens", default=True)


def _check_beam_search(
    body: Body, num_beams: int, num_candidates: int, structured: StructuredOutput | None
) -> None:
    """Raise ApiError (400) for what a beam search does not do."""
    if num_beams > _MAX_BEAMS:
        raise ApiError(
            400,
            f"n={num_beams} is the number of beams with use_beam_search; ask for at most "
            f"{_MAX_BEAMS}",
            param="n",
        )
    wrong_fields = [
        name for name in _NOT_WITH_BEAMS if body.get(name) not in (None, False, 0, [], {})
    ]
    told = ("logprobs", "prompt_logprobs")
    wrong_fields += [
        name for name in told if body.get(name) is not None and body[name] is not False
    ]
    if body.get("repetition_penalty") not in (None, 1):
        wrong_fields.append("repetition_penalty")
    if num_candidates > num_beams:
        wrong_fields.append("best_of")
    if structured is not None:
        wrong_fields += [name for name in sorted(STRUCTURED_FIELDS) if body.get(name) is not None]
    for name in wrong_fields:
        raise ApiError(
            400, f"{name} is not possible with use_beam_search; leave it out", param=name
        )


def _sampling(body: Body, default_temperature: float, tokenizer: Tokenizer) -> SamplingParams:
    vocab_size = tokenizer.vocab_size
    sampling = SamplingParams(
        temperature=number(body, "temperature", default_temperature, 0, _MAX_TEMPERATURE),
        top_p=number(body, "top_p", 1.0, 0, 1),
        top_k=max(integer(body, "top_k", 0, -1), 0),
        min_p=number(body, "min_p", 0.0, 0, 1),
        seed=_seed(body),
        ignore_eos=flag(body, "ignore_eos"),
        min_tokens=integer(body, "min_tokens", 0, 0),
        stop_token_ids=token_ids(body, "stop_token_ids", vocab_size, _MAX_STOP_TOKEN_IDS) or (),
        allowed_token_ids=_allowed_token_ids(body, vocab_size),
        bad_words=_bad_words(body, tokenizer),
        logit_bias=_logit_bias(body, vocab_size),
        presence_penalty=number(body, "presence_penalty", 0.0, -_MAX_PENALTY, _MAX_PENALTY),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -_MAX_PENALTY, _MAX_PENALTY),
        repetition_penalty=number(body, "repetition_penalty", 1.0, *_REPETITION_PENALTIES),
    )
    if sampling.min_tokens:
        _check_something_is_left(sampling, tokenizer)
    return sampling


def _allowed_token_ids(body: Body, vocab_size: int) -> tuple[int, ...] | None:
    allowed = token_ids(body, "allowed_token_ids", vocab_size)
    if allowed == ():
        raise wrong("allowed_token_ids", [], "a list of at least one token id")
    return allowed and tuple(dict.fromkeys(allowed))


def _check_something_is_left(sampling: SamplingParams, tokenizer: Tokenizer) -> None:
    """Raise ApiError (400) if before `min_tokens` no token may come but those that end it."""
    ends = tokenizer.end_token_ids.union(sampling.stop_token_ids)
    allowed = sampling.allowed_token_ids
    name = "stop_token_ids" if allowed is None else "allowed_token_ids"
    if ends.issuperset(range(tokenizer.vocab_size) if allowed is None else allowed):
        raise ApiError(
            400,
            f"{name} leave only tokens that end the output, but min_tokens={sampling.min_tokens} "
            "asks for others before",
            param=name,
        )


def _logit_bias(body: Body, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Return the tokens of `logit_bias`, each with its bias."""
    biases = mapping(body, "logit_bias")
    if len(biases) > _MAX_BIASES:
        raise wrong("logit_bias", biases, f"an object of at most {_MAX_BIASES} tokens")
    found: dict[int, float] = {}
    for name, bias in biases.items():
        if not (name.isdecimal() and len(name) <= _MAX_ID_DIGITS):
            raise wrong("logit_bias", biases, "an object from token ids, written as text")
        if (
            isinstance(bias, bool)
            or not isinstance(bias, int | float)
            or not abs(bias) <= _MAX_BIAS
        ):
            expected = f"an object with numbers in [-{_MAX_BIAS:g}, {_MAX_BIAS:g}]"
            raise wrong("logit_bias", biases, expected)
        found[int(name)] = float(bias)
    check_vocabulary("logit_bias", list(found), vocab_size)
    return tuple(found.items())


def _bad_words(body: Body, tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each bad word at the beginning of a text and after a space."""
    variants = [
        tuple(tokenizer.encode(text, add_special_tokens=False))
        for word in strings(body, "bad_words", _MAX_BAD_WORDS, _MAX_BAD_WORD_CHARS)
        for text in (word, f" {word}")
    ]
    return tuple(dict.fromkeys(ids for ids in variants if ids))


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """The settings by which a prompt becomes token ids."""

    add_special_tokens: bool
    """Whether the special tokens go in front that the model wants there."""
    truncate_tokens: int | None
    """How many tokens to keep, from the end; -1 for as many as fit, None for all."""
    template: TemplateOptions


def parse_prompt_options(body: Body, *, is_chat: bool) -> PromptOptions:
    """Return the options; the template of a chat writes special tokens, so none are added to it."""
    truncate_tokens = integer(body, "truncate_prompt_tokens", -2, -1)
    if truncate_tokens == 0:
        raise wrong("truncate_prompt_tokens", 0, "-1 or at least 1")
    add_special_tokens = flag(body, "add_special_tokens", default=not is_chat)
    tools = parse_tools(body)
    template = TemplateOptions(
        add_generation_prompt=flag(body, "add_generation_prompt", default=True),
        continue_final_message=flag(body, "continue_final_message"),
        add_special_tokens=add_special_tokens,
        values=mapping(body, "chat_template_kwargs"),
        tools=() if tools is None else tools.functions,
    )
    if template.add_generation_prompt and template.continue_final_message:
        raise ApiError(
            400,
            "continue_final_message=true needs add_generation_prompt=false: the answer either "
            "continues the last message or begins a new one",
            param="continue_final_message",
        )
    return PromptOptions(
        add_special_tokens, None if truncate_tokens == -2 else truncate_tokens, template
    )


def parse_prompts(body: Body, vocab_size: int) -> list[str | list[int]]:
    """Return the prompts as text or token ids; there may be one, or a list of several."""
    value = body.get("prompt")
    prompts: list[object] = [value]
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        prompts = value
    if len(prompts) > MOST_SEQUENCES:
        raise ApiError(
            400,
            f"prompt holds {len(prompts)} prompts; send at most {MOST_SEQUENCES} in one request",
            param="prompt",
        )
    return [_prompt(value, prompt, vocab_size) for prompt in prompts]


def _prompt(value: object, prompt: object, vocab_size: int) -> str | list[int]:
    """Return one prompt of the field's `value`."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not set(map(type, prompt)) <= {int}:
        raise wrong("prompt", value, "a string, a list of token ids, or a list of these")
    check_vocabulary("prompt", prompt, vocab_size)
    return prompt


def _max_tokens(body: Body, *, echoes: bool, sampling: SamplingParams) -> tuple[int | None, bool]:
    """Return the limit, if there is one, and whether there is an answer.

    With `echo` the limit may be 0.  Then the engine draws one token all the same, since a request
    ends with a token.
    """
    for name in ("max_completion_tokens", "max_tokens"):
        if body.get(name) is not None:
            limit = integer(body, name, 1, 0 if echoes else 1)
            if limit == 0 and sampling.min_tokens:
                raise ApiError(400, f"min_tokens exceeds {name}=0", param="min_tokens")
            return max(limit, 1), limit > 0
    return None, True


def _seed(body: Body) -> int | None:
    if body.get("seed") is None:
        return None
    return integer(body, "seed", 0, _MIN_SEED, _MAX_SEED)


def _cache_salt(body: Body) -> str | None:
    salt = body.get("cache_salt")
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    raise wrong("cache_salt", salt, "a string that is not empty")
