"""`tool_choice=auto`: answers that may be text, calls, or both, in the form of the chat template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_server_grammars import Running
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from slosched.engine.grammar import GuidanceCompiler
from slosched.engine.server import HuggingFaceTokenizer, serve_in_thread
from slosched.engine.server.call_form import CallForm, form_of
from slosched.engine.server.tool_calls import CallPart, TextAndCallReader
from slosched.engine.torch import LoadedModel, load_model
from slosched.engine.torch.tiny import tiny_tokenizer

HI: list[Any] = [{"role": "user", "content": "hi"}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER: Any = {"name": "get_weather", "parameters": {**CITY, "additionalProperties": False}}
TOOLS: Any = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": {"name": "get_time"}},
]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
"""The same functions as /v1/responses has them."""


def served(model: LoadedModel) -> Running:
    text = model.tokenizer.backend_tokenizer.to_str()  # type: ignore[union-attr]
    return Running(model, GuidanceCompiler(text, model.vocab_size, model.eos_token_ids), 512)


def tiny() -> LoadedModel:
    return load_model("tiny-random", dtype="float32", device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    running = served(tiny())
    with serve_in_thread(running.app, running.worker) as running.url:
        yield running
    running.kv.check()


def forced(server: Running, text: str, *, ends: bool = True) -> dict[str, Any]:
    """Return the fields by which a model that draws bytes greedily begins its answer with `text`.

    Each character that comes first in it is likelier than all that come later, and those that may
    not come are bad words.  `ends` lets the answer end behind `text`, or a call.
    """
    characters = list(dict.fromkeys(text))
    biases = {char: 100 - 6 * place for place, char in enumerate(characters)}
    bad = [
        text[:at] + other
        for at, char in enumerate(text)
        for other in characters[: characters.index(char)]
    ]
    bad += [end + char for end in ("call>", text) for char in characters if ends]
    ids = {server.tokenizer.encode(char)[0]: bias for char, bias in biases.items()}
    ids[min(server.tokenizer.end_token_ids)] = 25
    return {
        "temperature": 0,
        "logit_bias": {str(token_id): bias for token_id, bias in ids.items()},
        "extra_body": {"bad_words": list(dict.fromkeys(bad))},
    }


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"messages": HI, "tools": TOOLS, "max_tokens": 300, **fields}
    return client.chat.completions.create(model="tiny", **asked)


def check_call(call: Any) -> None:
    assert call.function.name in ("get_weather", "get_time")
    given = json.loads(call.function.arguments)
    assert given.get("city") in (("Rome", "Oslo") if "w" in call.function.name else (None,))


def test_an_answer_without_a_call_is_text(server: Running, client: openai.OpenAI) -> None:
    for fields in ({}, {"tool_choice": "auto"}):
        [answer] = ask(client, **forced(server, "a<tool"), **fields).choices
        assert (answer.message.content, answer.message.tool_calls) == ("a<tool", None)
        assert answer.finish_reason == "stop"


def test_text_and_a_call_are_told_apart(server: Running, client: openai.OpenAI) -> None:
    [answer] = ask(client, **forced(server, "a<tool_call>")).choices
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "a"
    [call] = answer.message.tool_calls
    assert call.id.startswith("call_")
    check_call(call)


@pytest.mark.parametrize("text", ["a<tool_call>", "<tool_call>", "a<tool"])
def test_a_stream_has_the_same_text_and_calls(
    server: Running, client: openai.OpenAI, text: str
) -> None:
    fields = {**forced(server, text), "n": 2}
    whole = ask(client, **fields).choices
    chunks = list(ask(client, **fields, stream=True))
    for place, expected in enumerate(whole):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == place]
        assert choices[0].delta.role == "assistant"
        content = "".join(c.delta.content or "" for c in choices)
        assert content == (expected.message.content or "")
        parts = [part for c in choices for part in c.delta.tool_calls or ()]
        said = [(p.index, p.function.name) for p in parts if p.function.name]
        calls = expected.message.tool_calls or ()
        assert said == [(i, call.function.name) for i, call in enumerate(calls)]
        for i, call in enumerate(calls):
            arguments = "".join(p.function.arguments for p in parts if p.index == i)
            assert arguments == call.function.arguments
        reasons = [c.finish_reason for c in choices if c.finish_reason]
        assert reasons == [expected.finish_reason] == ["tool_calls" if calls else "stop"]


def test_calls_are_many_unless_they_may_not_be(server: Running, client: openai.OpenAI) -> None:
    fields = forced(server, "a<tool_call>", ends=False)
    [many] = ask(client, **fields).choices
    assert many.finish_reason == "length"
    assert len(many.message.tool_calls) > 2
    for call in many.message.tool_calls[:-1]:
        check_call(call)
    [one] = ask(client, **fields, parallel_tool_calls=False).choices
    assert one.finish_reason == "tool_calls"
    [call] = one.message.tool_calls
    check_call(call)


def test_calls_and_results_of_earlier_turns_are_messages(
    server: Running, client: openai.OpenAI
) -> None:
    fields = forced(server, "<tool_call>")
    first = ask(client, **fields).choices[0].message
    turns = [
        *HI,
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"},
    ]
    [answer] = ask(client, messages=turns, **forced(server, "ok")).choices
    assert (answer.message.content, answer.finish_reason) == ("ok", "stop")


@pytest.mark.parametrize("special", [["<tool_call>"], ["<tool_call>", "</tool_call>"]])
def test_what_opens_and_closes_a_call_may_be_a_special_token(special: list[str]) -> None:
    """As a text without special tokens lacks it, they are not left out."""
    model = tiny()
    backend = model.tokenizer.backend_tokenizer.to_str()  # type: ignore[union-attr]
    for name, tag in zip(("<|pad|>", "<|im_start|>"), special, strict=False):
        backend = backend.replace(name, tag)
    changed = Tokenizer.from_str(backend)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=changed, eos_token="<|im_end|>")
    tokenizer.chat_template = model.tokenizer.chat_template  # type: ignore[union-attr]
    running = served(replace(model, tokenizer=tokenizer))
    with (
        serve_in_thread(running.app, running.worker) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        form = running.tokenizer.call_form
        assert form is not None
        assert form.is_special
        bias = {"logit_bias": {"0": 100}, "parallel_tool_calls": False, "temperature": 0}
        [answer] = ask(client, **bias).choices
        assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
        [call] = answer.message.tool_calls
        check_call(call)


def test_a_response_has_a_message_and_calls_as_items(
    server: Running, client: openai.OpenAI
) -> None:
    fields = forced(server, "a<tool_call>")
    extra = {**fields["extra_body"], "logit_bias": fields["logit_bias"]}
    asked: Any = {"model": "tiny", "input": "hi", "tools": FLAT, "temperature": 0}
    asked |= {"max_output_tokens": 300, "extra_body": extra}
    asked["include"] = ["message.output_text.logprobs"]
    whole = client.responses.create(**asked)
    assert (whole.status, whole.tool_choice, whole.output_text) == ("completed", "auto", "a")
    message, call = whole.output
    assert (message.type, call.type, call.status) == ("message", "function_call", "completed")
    [part] = message.content
    assert [each.token for each in part.logprobs] == ["a"], "those of the call are left out"
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert [kind for kind in kinds if "delta" not in kind] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    indices = [event.output_index for event in events if hasattr(event, "output_index")]
    assert indices == sorted(indices)
    assert set(indices) == {0, 1}
    final = events[-1].response
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert final.output[1].arguments == call.arguments


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_calls_by_itself_once_it_has_seen_a_call(smollm2: LoadedModel) -> None:
    """Nothing forces it: it was asked for the weather before, and called then."""
    own = HuggingFaceTokenizer(smollm2.tokenizer, smollm2.vocab_size)
    assert own.call_form is None, "its own template shows no functions"
    tokenizer = deepcopy(smollm2.tokenizer)
    tokenizer.chat_template = tiny_tokenizer().chat_template  # type: ignore[union-attr]
    running = served(replace(smollm2, tokenizer=tokenizer))
    arguments = json.dumps({"city": "Rome"})
    call = {"id": "c1", "type": "function"}
    turns = [
        {"role": "user", "content": "weather in Rome?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "get_weather", "arguments": arguments}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": "weather in Oslo?"},
    ]
    with (
        serve_in_thread(running.app, running.worker) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked = {"messages": turns, "temperature": 0, "max_tokens": 48, "tools": TOOLS[:1]}
        [answer] = ask(client, **asked).choices
    assert (answer.message.content, answer.finish_reason) == (None, "tool_calls")
    [found] = answer.message.tool_calls
    assert (found.function.name, json.loads(found.function.arguments)) == (
        "get_weather",
        {"city": "Oslo"},
    )


def test_a_template_that_shows_no_functions_or_another_form_has_no_form() -> None:
    def without(_messages: Any, _tools: Any) -> str:
        return "user: hi"

    def other(messages: Any, tools: Any) -> str:
        calls = [call for message in messages for call in message.get("tool_calls", ())]
        return f"{json.dumps(tools)}\n[TOOL_CALLS] {json.dumps(calls)}"

    def refuses(_messages: Any, _tools: Any) -> str:
        raise ValueError("roles must alternate")

    assert [form_of(render) for render in (without, other, refuses)] == [None, None, None]


def test_the_form_is_the_one_of_the_template() -> None:
    form = HuggingFaceTokenizer(tiny().tokenizer, 259).call_form
    assert form == CallForm("\n", "\n")
    begin = '<tool_call>\n{"name": "f", "arguments": '
    assert (form.begin("f"), form.end) == (begin, "}\n</tool_call>")


TEXTS = st.text("ab <tool_call>\n{", max_size=12).filter(lambda text: "<tool_call>" not in text)
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.text('a"\\{}<tool_call>/') | st.none())
ANSWERS = st.lists(st.tuples(TEXTS, st.sampled_from(["f", "get-x_1"]), ARGUMENTS), max_size=3)


@given(ANSWERS, TEXTS, st.lists(st.integers(0, 300)), st.booleans())
def test_text_and_calls_are_found_wherever_the_answer_is_cut(
    calls: list[tuple[str, str, Any]], end: str, cuts: list[int], ascii_only: bool
) -> None:
    form = CallForm("\n", "\n")
    text = "".join(
        before + form.begin(name) + json.dumps(given, ensure_ascii=ascii_only) + form.end
        for before, name, given in calls
    )
    reader, parts = TextAndCallReader(), list[CallPart | str]()
    for begin, stop in pairwise([0, *sorted(cuts), len(text + end)]):
        parts += reader.push((text + end)[begin:stop])
    parts.append(reader.flush())
    content = "".join(part for part in parts if isinstance(part, str))
    expected = [before.rstrip() for before, _, _ in calls] + [end.rstrip() if calls else end]
    assert content == "".join(expected)
    found: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, CallPart):
            assert (part.name is None) == (part.place in found)
            found.setdefault(part.place, [part.name or ""]).append(part.arguments)
    heads = [(name, json.loads("".join(said))) for name, *said in found.values()]
    assert heads == [(name, given) for _, name, given in calls]
