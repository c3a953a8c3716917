"""/v1/responses, driven by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import Live, live, with_client

from slosched.core import SLO
from slosched.policy import FCFS, Door
from slosched.workload.service_tier import ServiceTier

PATH = "/v1/responses"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    gold = ServiceTier("gold", SLO(20.0, 5.0))
    with live(Door(FCFS()), tiers=(gold,)) as running:
        yield running


def test_an_answer_with_its_settings_and_usage(client: openai.OpenAI) -> None:
    answer = client.responses.create(
        model="echo",
        instructions="be brief",
        input="hi",
        max_output_tokens=9,
        temperature=0.5,
        top_p=0.75,
        metadata={"who": "me"},
        extra_body={"slo_ttft_ms": 5000, "service_tier": "gold"},
    )
    assert answer.id.startswith("resp-")
    assert (answer.object, answer.model, answer.service_tier) == ("response", "echo", "gold")
    assert answer.output_text == "system: b"
    assert answer.status == "incomplete", "the device repeats the prompt until the limit"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert (answer.instructions, answer.max_output_tokens) == ("be brief", 9)
    assert (answer.temperature, answer.top_p, answer.metadata) == (0.5, 0.75, {"who": "me"})
    assert answer.usage is not None
    num_input_tokens = len("system: be brief\nuser: hi\nassistant: ")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (num_input_tokens, 9)
    assert answer.usage.input_tokens_details.cached_tokens == 0
    [message] = answer.output
    assert (message.type, message.role) == ("message", "assistant")  # type: ignore[union-attr]


def test_an_answer_that_ends_by_itself_is_completed(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="echo", input="hi", extra_body={"stop": "hi"})
    assert (answer.status, answer.incomplete_details) == ("completed", None)
    assert answer.output_text == "user: "
    assert answer.completed_at is not None


def test_a_conversation_goes_on_with_earlier_output(client: openai.OpenAI) -> None:
    first = client.responses.create(model="echo", input="hi", max_output_tokens=4)
    said: list[Any] = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        *(item.model_dump(exclude_none=True) for item in first.output),
        {"type": "message", "role": "user", "content": "more"},
    ]
    answer = client.responses.create(model="echo", input=said, max_output_tokens=200)
    prompt = "system: be kind\nuser: hi\nassistant: user\nuser: more\nassistant: "
    assert answer.output_text.startswith(prompt)


def test_calls_of_functions_and_their_results_are_input_like_messages(server: Live) -> None:
    """The calls of one answer become one message, as templates want them."""
    said = [
        {"role": "user", "content": "hi"},
        *(
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"}
            for i in range(2)
        ),
        *(
            {"type": "function_call_output", "call_id": f"c{i}", "output": f"found {i}"}
            for i in range(2)
        ),
    ]
    status, answer, _ = server.post(PATH, input=said, max_output_tokens=300)
    assert status == 200, answer
    [message] = answer["output"]
    prompt = "user: hi\nassistant: \ntool: found 0\ntool: found 1\nassistant: "
    assert message["content"][0]["text"].startswith(prompt)


def test_the_events_of_a_stream_add_up_to_the_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "echo", "input": "héllo", "max_output_tokens": 12}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * len(deltas),
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert len(deltas) == 11, "no event for half a character"
    text = "".join(event.delta for event in deltas)
    last: Any = events[-1]
    assert text == last.response.output_text == whole.output_text == "user: héllo"
    ids = {event.item_id for event in deltas}
    assert ids == {last.response.output[0].id}
    assert last.response.usage == whole.usage
    begun: Any = events[0]
    assert (begun.response.status, begun.response.output) == ("in_progress", [])
    assert begun.response.id == last.response.id


def test_the_client_library_follows_a_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model="echo", input="hi", extra_body={"stop": "hi"}) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert (final.status, final.output_text) == ("completed", "user: ")


def test_a_stream_that_fails_ends_with_a_failed_response(server: Live) -> None:
    body = {"input": "abc", "max_output_tokens": 200, "stream": True}

    async def scenario(client: Any) -> str:
        async with client.post(PATH, json=body) as response:
            assert response.status == 200
            server.device.fault = RuntimeError("the device fell off the bus")
            text = await response.text()
            server.device.fault = None
            return str(text)

    text = asyncio.run(with_client(server.url, scenario))
    *_, last = text.strip().split("\n\n")
    name, data = last.split("\n")
    failed = json.loads(data.removeprefix("data: "))
    assert name == "event: response.failed"
    assert failed["response"]["status"] == "failed"
    assert "fell off the bus" in failed["response"]["error"]["message"]


def test_a_promise_that_cannot_be_kept_is_a_429_for_streams_too(client: openai.OpenAI) -> None:
    for is_streaming in (False, True):
        with pytest.raises(openai.RateLimitError, match="alone on this device"):
            client.responses.create(
                model="echo", input="hi", stream=is_streaming, extra_body={"slo_ttft_ms": 0.001}
            )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": "f"}, "tools"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"parallel_tool_calls": ["yes"], "stream": True}, "parallel_tool_calls"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"include": [{"a": 1}]}, "include"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"conversation": "c"}, "conversation"),
        ({"messages": HI}, "messages"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": ["hi"]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "reasoning"}]}, "input[0].type"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "c"}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, "input[0].arguments"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"instructions": ["x"]}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_what_is_wrong_or_not_done_is_refused_by_name(
    server: Live, fields: dict[str, Any], param: str
) -> None:
    status, document, _ = server.post(PATH, **{"input": "hi", **fields})
    assert (status, document["error"]["param"]) == (400, param)


def test_what_changes_nothing_is_taken(server: Live) -> None:
    neutral = {
        "background": False,
        "truncation": "disabled",
        "store": True,
        "tools": [],
        "user": "u",
    }
    assert server.post(PATH, input="hi", max_output_tokens=3, **neutral)[0] == 200
