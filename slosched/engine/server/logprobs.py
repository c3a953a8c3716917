"""Log-probabilities as OpenAI's endpoints write them.

Sources: OpenAI's API reference, and vLLM 0.32's `CompletionLogProbs` and `ChatCompletionLogProbs`
for what the reference leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from slosched.core import TokenLogprobs
from slosched.engine.server.errors import ApiError
from slosched.engine.server.tokenizer import Tokenizer
from slosched.engine.server.values import Body, flag, integer, wrong

Json = dict[str, object]

MOST_LIKELIEST = 20
_TEXTS: WeakKeyDictionary[Tokenizer, dict[int, str]] = WeakKeyDictionary()
"""The texts of single tokens, of which 128 answers ask for 2,688 in a step."""
LEAST = -9999.0
"""What is told of a token that the model takes for impossible, since JSON has no infinity."""


def parse_num_logprobs(body: Body) -> int | None:
    """Return how many of the likeliest tokens are told at each place; None if nothing is told.

    A chat asks for them with `logprobs` and `top_logprobs`, a completion with the number alone.
    Raises ApiError (400) that names a wrong field.
    """
    if "messages" not in body:
        if isinstance(body.get("logprobs"), bool):
            if body["logprobs"]:
                raise wrong("logprobs", True, f"an integer in [0, {MOST_LIKELIEST}]")
            return None
        num = integer(body, "logprobs", -1, 0, MOST_LIKELIEST)
        return None if num < 0 else num
    num = integer(body, "top_logprobs", 0, 0, MOST_LIKELIEST)
    if flag(body, "logprobs"):
        return num
    if num:
        raise ApiError(
            400, f"top_logprobs={num} needs logprobs=true beside it", param="top_logprobs"
        )
    return None


def parse_num_prompt_logprobs(body: Body) -> int | None:
    """Return the same for the tokens of the prompt (`prompt_logprobs`, which is vLLM's).

    Raises ApiError (400) for a wrong number, and for a stream, which as in vLLM has no place for
    them; with `echo` it has.
    """
    num = integer(body, "prompt_logprobs", -1, 0, MOST_LIKELIEST)
    if num >= 0 and flag(body, "stream"):
        raise ApiError(
            400,
            "prompt_logprobs are not in streams: leave out stream, or send echo=true with logprobs "
            "to /v1/completions",
            param="prompt_logprobs",
        )
    return None if num < 0 else num


class Told(NamedTuple):
    """What is told of one token of an answer."""

    text: str
    logprob: float
    likeliest: tuple[tuple[str, float], ...]
    """The texts of the likeliest tokens at its place with theirs, the likeliest first."""


def tell(token_id: int, logprobs: TokenLogprobs, tokenizer: Tokenizer) -> Told:
    """Return what is told of one token."""
    return Told(
        _text(token_id, tokenizer),
        max(logprobs.drawn, LEAST),
        tuple((_text(other, tokenizer), max(at, LEAST)) for other, at in logprobs.likeliest),
    )


def _text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return the text of one token, which is decoded once."""
    texts = _TEXTS.get(tokenizer)
    if texts is None:
        texts = _TEXTS[tokenizer] = {}
    text = texts.get(token_id)
    if text is None:
        text = texts[token_id] = tokenizer.decode([token_id], skip_special_tokens=False)
    return text


def of_completion(tokens: Sequence[Told], offset: int) -> Json:
    """Return the object of a completion, whose first token begins `offset` characters behind."""
    offsets = []
    for each in tokens:
        offsets.append(offset)
        offset += len(each.text)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": list(map(by_text, tokens)),
        "text_offset": offsets,
    }


def by_text(token: Told) -> dict[str, float]:
    """Return the likeliest texts and the drawn one; of tokens that look alike the likeliest counts.

    Tokens that are parts of a character do.
    """
    by_text: dict[str, float] = {}
    for text, logprob in token.likeliest:
        by_text.setdefault(text, logprob)
    by_text.setdefault(token.text, token.logprob)
    return by_text


def of_chat(tokens: Sequence[Told], _offset: int) -> Json:
    """Return the object of a chat."""
    return {"content": entries(tokens)}


def entries(tokens: Sequence[Told]) -> list[Json]:
    """Return an entry for each token, as chats and /v1/responses have them."""
    return [
        {
            **_entry(each.text, each.logprob),
            "top_logprobs": [_entry(text, logprob) for text, logprob in each.likeliest],
        }
        for each in tokens
    ]


def _entry(text: str, logprob: float) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
