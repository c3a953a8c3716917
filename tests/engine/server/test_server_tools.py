"""Answers that call functions, and what is refused of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from live_server import live, post, with_client
from test_server_grammars import Running

from slosched.engine.grammar import GuidanceCompiler
from slosched.engine.server import serve_in_thread
from slosched.engine.server.errors import ApiError
from slosched.engine.server.tool_calls import CallReader
from slosched.engine.server.tools import parse_tools
from slosched.engine.torch import load_model

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Rome", "Oslo"]},
                "day": {"$ref": "#/$defs/day"},
            },
            "required": ["city", "day"],
            "additionalProperties": False,
            "$defs": {"day": {"type": "integer", "minimum": 1, "maximum": 31}},
        },
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    model = load_model("tiny-random", dtype="float32", device="cpu", num_threads=1)
    backend = model.tokenizer.backend_tokenizer
    compiler = GuidanceCompiler(backend.to_str(), model.vocab_size, model.eos_token_ids)
    running = Running(model, compiler, num_blocks=512)
    with serve_in_thread(running.app, running.worker) as running.url:
        yield running
    running.kv.check()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    asked = {"messages": HI, "tools": [WEATHER, TIME], "max_tokens": 400, "seed": 1, **fields}
    return client.chat.completions.create(model="tiny", **asked)


def check_call(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "get_time":
        assert given == {}
    else:
        assert name == "get_weather"
        assert given["city"] in ("Rome", "Oslo")
        assert given["day"] in range(1, 32)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_an_answer_calls_functions_with_arguments_that_fit(
    client: openai.OpenAI, choice: Any
) -> None:
    [answer] = ask(client, tool_choice=choice, parallel_tool_calls=False).choices
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    [call] = answer.message.tool_calls
    assert call.id.startswith("call_")
    check_call(call.function.name, call.function.arguments)
    if choice != "required":
        assert call.function.name == "get_weather"


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("name", ["https://example.com/weather.json", "weather"])
def test_a_schema_may_have_an_id_and_references(
    client: openai.OpenAI, choice: Any, name: str
) -> None:
    """They are looked for in the schema of this id, wherever it stands among others."""
    function: Any = WEATHER["function"]
    parameters = {"$id": name, **function["parameters"]}
    named = {"type": "function", "function": {**function, "parameters": parameters}}
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "tools": [named, TIME]}
    [call] = ask(client, **fields).choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_stream_has_the_same_calls_piece_by_piece(client: openai.OpenAI, choice: Any) -> None:
    fields = {"tool_choice": choice, "parallel_tool_calls": False, "n": 2}
    whole = ask(client, **fields)
    chunks = list(ask(client, **fields, stream=True))
    for place, expected in enumerate(whole.choices):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == place]
        parts = [part for c in choices for part in c.delta.tool_calls or ()]
        assert len(parts) > 2
        assert {part.index for part in parts} == {0}
        [name] = [part.function.name for part in parts if part.function.name]
        arguments = "".join(part.function.arguments or "" for part in parts)
        [call] = expected.message.tool_calls
        assert (name, arguments) == (call.function.name, call.function.arguments)
        assert [c.finish_reason for c in choices if c.finish_reason] == ["tool_calls"]
        assert choices[0].delta.role == "assistant"
        assert sum(part.id is not None for part in parts) == 1


def test_calls_that_are_cut_off_end_by_length(client: openai.OpenAI) -> None:
    [answer] = ask(client, tool_choice=NAMED, max_tokens=3).choices
    assert answer.finish_reason == "length"
    [call] = answer.message.tool_calls
    assert call.function.name == "get_weather"


def test_the_calls_and_results_of_earlier_turns_are_messages(client: openai.OpenAI) -> None:
    first = ask(client, tool_choice=NAMED).choices[0].message
    turns = [
        *HI,
        first.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"},
    ]
    answer = ask(client, messages=turns, tool_choice="none", max_tokens=4)
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage.completion_tokens == 4


def test_a_call_without_arguments_may_say_nothing_at_all(client: openai.OpenAI) -> None:
    """Many models write an empty text for a function without parameters, as vLLM takes it."""

    def num_tokens(arguments: str) -> list[int]:
        called = {"name": "get_time", "arguments": arguments}
        call = {"id": "call_1", "type": "function", "function": called}
        turns = [
            *HI,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        ]
        items = [
            *HI,
            {"type": "function_call", "call_id": "call_1", **called},
            {"type": "function_call_output", "call_id": "call_1", "output": "noon"},
        ]
        chat = ask(client, messages=turns, tool_choice="none", max_tokens=1)
        response = respond(client, input=items, tool_choice="none", max_output_tokens=1)
        return [chat.usage.prompt_tokens, response.usage.input_tokens]

    assert num_tokens("") == num_tokens("{}")


FLAT = [{"type": "function", **WEATHER["function"]}, {"type": "function", "name": "get_time"}]  # type: ignore[dict-item]
"""The same functions as /v1/responses has them."""


def respond(client: openai.OpenAI, **fields: Any) -> Any:
    """Ask with a seed for which the tiny model makes two calls if one is required."""
    asked = {"input": "hi", "tools": FLAT, "max_output_tokens": 1200, "extra_body": {"seed": 19}}
    return client.responses.create(model="tiny", **{**asked, **fields})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_a_response_has_the_calls_as_items_whole_and_as_events(
    client: openai.OpenAI, choice: Any
) -> None:
    whole = respond(client, tool_choice=choice)
    assert (whole.status, whole.tool_choice) == ("completed", choice) or choice != "required"
    assert whole.output_text == ""
    for call in whole.output:
        assert (call.type, call.status) == ("function_call", "completed")
        check_call(call.name, call.arguments)
    assert len({call.call_id for call in whole.output}) == len(whole.output) >= 1
    events = list(respond(client, tool_choice=choice, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:3] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert kinds[-1] == "response.completed"
    deltas: dict[str, str] = {}
    for event in events:
        if event.type == "response.function_call_arguments.delta":
            deltas[event.item_id] = deltas.get(event.item_id, "") + event.delta
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert [(e.output_index, e.arguments) for e in done] == list(enumerate(deltas.values()))
    final = events[-1].response
    assert [call.id for call in final.output] == list(deltas)
    called = [(call.name, call.arguments) for call in final.output]
    assert called == [(call.name, call.arguments) for call in whole.output]
    # The second one finds its prompt in the cache, which the first does only behind another test.
    assert final.usage.input_tokens_details.cached_tokens == 512
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert getattr(final.usage, name) == getattr(whole.usage, name) > 0


def test_the_client_library_follows_calls_and_sends_them_back(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "name": "get_weather"}
    asked: dict[str, Any] = {"model": "tiny", "tools": FLAT, "max_output_tokens": 400}
    with client.responses.stream(input="hi", tool_choice=choice, **asked) as stream:
        for _ in stream:
            pass
        [call] = stream.get_final_response().output
    assert call.type == "function_call"
    turns: Any = [
        {"role": "user", "content": "hi"},
        call.model_dump(exclude_none=True, exclude={"parsed_arguments"}),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    answer = client.responses.create(
        model="tiny", input=turns, tools=FLAT, tool_choice="none", max_output_tokens=4
    )
    assert [item.type for item in answer.output] == ["message"]


def test_a_call_of_a_response_that_is_cut_off_is_incomplete(client: openai.OpenAI) -> None:
    choice = {"type": "function", "name": "get_weather"}
    answer = respond(client, tool_choice=choice, max_output_tokens=3)
    [call] = answer.output
    assert (answer.status, call.status, call.name) == ("incomplete", "incomplete", "get_weather")
    assert answer.incomplete_details.reason == "max_output_tokens"


FUNCTION = {"name": "f"}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [TIME], "tool_choice": NAMED}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": NAMED, "tools": []}, "tool_choice"),
    ({"tools": "f", "tool_choice": "required"}, "tools"),
    ({"tools": [TIME, TIME], "tool_choice": "required"}, "tools"),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tools[0]"),
    ({"tools": [{"type": "function"}], "tool_choice": "required"}, "tools[0].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a b"}}], "tool_choice": "none"},
        "tools[0].function.name",
    ),
    (
        {"tools": [{"type": "function", "function": {**FUNCTION, "x": 1}}], "tool_choice": "none"},
        "tools[0].function.x",
    ),
    (
        {
            "tools": [
                {"type": "function", "function": {**FUNCTION, "parameters": {"type": "array"}}}
            ],
            "tool_choice": "required",
        },
        "tools[0].function.parameters",
    ),
    ({"tools": [TIME], "tool_choice": "required", "use_beam_search": True}, "tools"),
    ({"tools": [TIME], "tool_choice": "auto", "use_beam_search": True}, "tools"),
    ({"tools": [TIME], "ignore_eos": True}, "ignore_eos"),
    ({"tools": [TIME], "response_format": {"type": "json_object"}}, "response_format"),
    (
        {"tools": [TIME], "tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
]


def test_what_is_wrong_is_refused_by_name(server: Running) -> None:
    async def ask_all(client: Any) -> list[tuple[int, Any, Any]]:
        return [await post(client, CHAT, messages=HI, **fields) for fields, _ in WRONG]

    answers = asyncio.run(with_client(server.url, ask_all))
    found = [(status, document["error"]["param"]) for status, document, _ in answers]
    assert found == [(400, param) for _, param in WRONG]


def test_a_device_that_follows_no_grammar_calls_nothing() -> None:
    with live() as server:
        status, document, _ = server.post(CHAT, messages=HI, tools=[TIME], tool_choice="required")
        assert (status, document["error"]["param"]) == (400, "tools")
        for choice in (None, "auto"):
            status, document, _ = server.post(CHAT, messages=HI, tools=[TIME], tool_choice=choice)
            assert (status, document["error"]["param"]) == (400, "tool_choice")
            assert "its chat template does not show it functions" in document["error"]["message"]


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(10_000):
        schema = {"not": schema}
    function = {**FUNCTION, "parameters": schema}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    with pytest.raises(ApiError, match="nested too deeply"):
        parse_tools(body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(["f", "get-x_1", "parameters"]), st.dictionaries(st.text(), JSON)),
    min_size=1,
    max_size=4,
)


@given(CALLS, st.lists(st.integers(0, 400)), st.sampled_from([None, 1, " \n"]), st.booleans())
def test_calls_are_found_in_any_text_that_follows_the_grammar_cut_anywhere(
    calls: list[tuple[str, Any]], cuts: list[int], indent: Any, ascii_only: bool
) -> None:
    listed = [{"name": name, "parameters": parameters} for name, parameters in calls]
    text = json.dumps(listed, indent=indent, ensure_ascii=ascii_only)
    reader, places = CallReader(None), [0, *sorted(cuts), len(text)]
    found: dict[int, list[str]] = {}
    for begin, end in pairwise(places):
        for part in reader.push(text[begin:end]):
            assert (part.name is None) == (part.place in found)
            found.setdefault(part.place, [part.name or ""]).append(part.arguments)
    heads = [(name, json.loads("".join(parts))) for name, *parts in found.values()]
    assert heads == calls
