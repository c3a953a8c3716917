"""Every endpoint and every field, over HTTP, against a device that echoes the prompt."""

from __future__ import annotations

import asyncio
import http.client
import json
import select
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import MODEL, Live, live, post, with_client

from slosched.core import SLO, EndReason, Limits, RequestStatus
from slosched.engine.server.errors import ApiError
from slosched.engine.server.slo import parse_slo
from slosched.policy.spec import make_policy

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(default_slo=SLO(1.5, 0.25)) as running:
        yield running


def test_health_and_models(server: Live) -> None:
    assert server.get("/health") == (200, '{"status":"ok"}')
    [model] = json.loads(server.get("/v1/models")[1])["data"]
    assert (model["id"], model["max_model_len"], model["vocab_size"]) == (MODEL, 512, 256)


@pytest.mark.parametrize("prompt", ["héllo 🙂", list("héllo 🙂".encode()), ["héllo 🙂"]])
def test_a_completion_whole_and_streamed(server: Live, prompt: Any) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 11}
    status, answer, _ = server.post(**body)
    assert status == 200
    assert answer["object"] == "text_completion"
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("héllo 🙂", "length")
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 11)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}

    events = server.events(**body, stream_options={"include_usage": True})
    *chunks, last = events
    assert len(chunks) == 11, "one chunk a token"
    assert len({event["id"] for event in events}) == 1
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert texts == ["h", "", "é", "l", "l", "o", " ", "", "", "", "🙂"]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 10 + ["length"]
    assert last["choices"] == []
    assert last["usage"] == usage
    assert last["metrics"]["time_to_first_token_ms"] >= last["metrics"]["queue_time_ms"] >= 0


def test_half_a_character_at_the_end_is_replaced(server: Live) -> None:
    body = {"prompt": "é", "max_tokens": 3}
    assert server.post(**body)[1]["choices"][0]["text"] == "é\ufffd"
    assert [e["choices"][0]["text"] for e in server.events(**body)] == ["", "é", "\ufffd"]


def test_a_chat_whole_and_streamed(server: Live) -> None:
    parts = [{"type": "text", "text": "hi"}]
    for content in ("hi", parts):
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": content}],
            "max_completion_tokens": 8,
        }
        status, answer, _ = server.post(CHAT, **body)
        assert status == 200
        assert answer["object"] == "chat.completion"
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": "user: hi"}
        events = server.events(CHAT, **body)
        assert {event["object"] for event in events} == {"chat.completion.chunk"}
        deltas = [event["choices"][0]["delta"] for event in events]
        assert deltas[0] == {"role": "assistant", "content": "u"}
        assert deltas[1:] == [{"content": c} for c in "ser: hi"]


def test_limits_that_the_client_leaves_out(server: Live) -> None:
    answer = server.post(prompt="abc")[1]
    assert answer["usage"]["completion_tokens"] == 16
    assert server.post(CHAT, messages=HI)[1]["usage"]["total_tokens"] == 512
    answer = server.post(prompt=[65] * 510)[1]
    assert answer["usage"]["completion_tokens"] == 2
    assert (
        server.post(prompt="x", max_tokens=3, max_completion_tokens=5)[1]["usage"][
            "completion_tokens"
        ]
        == 5
    )


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "STOP"}, "ab"),
        ({"stop": ["zzz", "PQ"]}, "abSTO"),
        ({"stop": "STOP", "min_tokens": 6}, "abSTOPQ" + "ab"),
        ({"stop": "QabS"}, "abSTOP"),
        ({"stop": "nowhere"}, "abSTOPQ" * 2 + "abSTOP"),
        ({"stop_token_ids": [ord("T")]}, "abS"),
        ({"stop_token_ids": [ord("T")], "min_tokens": 5}, "abSTOPQabS"),
    ],
)
def test_stops(server: Live, fields: dict[str, Any], text: str) -> None:
    body = {"prompt": "abSTOPQ", "max_tokens": 20, **fields}
    [choice] = server.post(**body)[1]["choices"]
    expected = "length" if len(text) == 20 else "stop"
    assert (choice["text"], choice["finish_reason"]) == (text, expected)
    events = [event["choices"][0] for event in server.events(**body)]
    assert "".join(event["text"] for event in events) == text
    assert [event["finish_reason"] for event in events[-2:]] == [None, expected]


def test_a_stop_string_counts_as_finished_and_frees_its_blocks(server: Live) -> None:
    while not server.device.released.empty():
        server.device.released.get()
    answer = server.post(prompt="a" * 50 + "!", max_tokens=400, stop="!")[1]
    assert answer["usage"]["completion_tokens"] == 51
    assert server.device.released.get(timeout=5) == answer["id"]
    assert server.num_held_blocks == 0
    server.post(prompt="x", max_tokens=1)  # its answer comes after the other's record
    record = next(r for r in server.worker.records if r.request_id == answer["id"])
    assert (record.status, record.end_reason) == (RequestStatus.FINISHED, EndReason.STOP)
    assert record.num_output_tokens < 400


def test_harmless_fields_nulls_and_neutral_values_are_fine(server: Live) -> None:
    status, answer, _ = server.post(
        prompt="ab",
        max_tokens=2,
        user="me",
        metadata={"x": "1"},
        store=True,
        service_tier="auto",
        tool_choice="none",
        chat_template=None,
        n=1,
        logprobs=None,
        presence_penalty=0.0,
        stop=None,
        top_k=-1,
        tools=[],
        stream_options=None,
    )
    assert (status, answer["choices"][0]["text"]) == (200, "ab")


WRONG = [
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"n": True}, "n"),
    ({"n": 3, "best_of": 2}, "best_of"),
    ({"best_of": 3, "stream": True}, "best_of"),
    ({"n": 64, "prompt": ["a", "b", "c"]}, "n"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"use_beam_search": True, "stream": True}, "stream"),
    ({"use_beam_search": True, "n": 17}, "n"),
    ({"use_beam_search": True, "best_of": 2}, "best_of"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"length_penalty": 2}, "length_penalty"),
    ({"logprobs": 1}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": "1"}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"use_beam_search": True, "n": 2, "repetition_penalty": 1.1}, "repetition_penalty"),
    ({"use_beam_search": True, "n": 2, "logit_bias": {"7": 1}}, "logit_bias"),
    ({"logit_bias": {"word": 1}}, "logit_bias"),
    ({"logit_bias": {"7": 101}}, "logit_bias"),
    ({"logit_bias": {"7": True}}, "logit_bias"),
    ({"logit_bias": {"256": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "jsonobject"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "text", "strict": True}}, "response_format.strict"),
    ({"made_up": 1}, "made_up"),
    ({"max_token": 1}, "max_token"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ({"structured_outputs": {"regex": "a+"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": 7}}, "structured_outputs.regex"),
    ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
    (
        {"structured_outputs": {"structural_tag": "{}"}},
        "structured_outputs.structural_tag.triggers",
    ),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        "response_format.format",
    ),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "format": {"type": "triggered_tags", "triggers": ["<"], "at_least_one": True},
            }
        },
        "response_format.format.at_least_one",
    ),
    (
        {"response_format": {"type": "structural_tag", "triggers": ["<"], "structures": []}},
        "response_format.structures",
    ),
    (
        {
            "response_format": {
                "type": "structural_tag",
                "triggers": ["<a"],
                "structures": [{"begin": "<b>", "schema": {}, "end": "</b>"}],
            }
        },
        "response_format.structures.begin",
    ),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["b", ""]}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json": 7}}, "structured_outputs.json"),
    (
        {"structured_outputs": {"json": {}, "whitespace_pattern": 1}},
        "structured_outputs.whitespace_pattern",
    ),
    ({"guided_json": {}}, "guided_json"),
    ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
    ({"guided_json": {}, "ignore_eos": True}, "ignore_eos"),
    ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"guided_choice": ["a"]}, "guided_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"vllm_xargs": {"a": 1}}, "vllm_xargs"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"stream_options": {"made_up": True}}, "stream_options.made_up"),
    ({"min_p": 1.5}, "min_p"),
    ({"bad_words": [""]}, "bad_words"),
    ({"bad_words": ["x"] * 65}, "bad_words"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [256]}, "allowed_token_ids"),
    ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"skip_special_tokens": "no"}, "skip_special_tokens"),
    ({"stop": "x" * 513}, "stop"),
    ({"prompt": ["a", 7]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 7}, "prompt"),
    ({"prompt": [1, 256]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [1, True]}, "prompt"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "10"}, "max_tokens"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 7}, "cache_salt"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": [1]}, "stream_options"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"slo_ttft_ms": -5}, "slo_ttft_ms"),
    ({"slo_tpot_ms": 0}, "slo_tpot_ms"),
    ({"slo_tpot_ms": "soon"}, "slo_tpot_ms"),
    ({"slo_ttft_ms": 10**400}, "slo_ttft_ms"),
    ({"slo_ttft_ms": True}, "slo_ttft_ms"),
    ({"slo_ttft": 1}, "slo_ttft"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_a_wrong_field_is_named_with_its_value(
    server: Live, fields: dict[str, Any], param: str
) -> None:
    status, answer, _ = server.post(**{"prompt": "x", **fields})
    assert (status, answer["error"]["param"]) == (400, param)
    assert set(answer["error"]) >= {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert param in answer["error"]["message"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 3}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": 1}], "messages[0].tool_calls"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1"}]}],
            "messages[0].tool_calls[0].function.name",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([{"role": "tool", "content": "x", "tool_call_id": 1}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
    ],
)
def test_wrong_messages(server: Live, messages: Any, param: str) -> None:
    status, answer, _ = server.post(CHAT, messages=messages)
    assert (status, answer["error"]["param"]) == (400, param)


def test_the_stop_string_is_part_of_the_text_if_asked_for(server: Live) -> None:
    body = {"prompt": "abSTOPQ", "max_tokens": 20, "include_stop_str_in_output": True}
    for stop in ({"stop": "STOP"}, {"stop_token_ids": [ord("P")]}):
        [choice] = server.post(**body, **stop)[1]["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("abSTOP", "stop")


def test_token_ids_are_returned_if_asked_for(server: Live) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "return_token_ids": True}
    [choice] = server.post(**body)[1]["choices"]
    assert choice["prompt_token_ids"] == list(b"abc")
    assert choice["token_ids"] == list(b"abca")
    first, *others = [event["choices"][0] for event in server.events(**body)]
    assert (first["prompt_token_ids"], first["token_ids"]) == (list(b"abc"), [97])
    assert [choice["token_ids"] for choice in others] == [[98], [99], [97]]
    assert not any("prompt_token_ids" in choice for choice in others)
    chat = server.post(CHAT, messages=HI, max_tokens=2, return_token_ids=True)[1]
    assert bytes(chat["prompt_token_ids"]) == b"user: hi\nassistant: "
    assert chat["choices"][0]["token_ids"] == list(b"us")


def test_every_event_has_the_usage_so_far_if_asked_for(server: Live) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events(prompt="abc", max_tokens=3, stream_options=options)
    assert [event["usage"]["completion_tokens"] for event in events] == [1, 2, 3, 3]
    without = server.events(prompt="abc", max_tokens=3, stream_options={"include_usage": True})
    assert ["usage" in event for event in without] == [False] * 3 + [True]


def test_only_the_end_of_a_prompt_is_kept_if_asked_for(server: Live) -> None:
    kept = server.post(prompt="abcdef", max_tokens=2, truncate_prompt_tokens=2)[1]
    assert (kept["choices"][0]["text"], kept["usage"]["prompt_tokens"]) == ("ef", 2)
    fitting = server.post(prompt="x" * 600, max_tokens=12, truncate_prompt_tokens=-1)[1]
    assert fitting["usage"]["prompt_tokens"] == 500


def test_a_conversation_may_end_in_an_open_message(server: Live) -> None:
    messages = [*HI, {"role": "assistant", "content": "hello"}]
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    tokens = server.post("/tokenize", messages=messages, **fields)[1]["tokens"]
    assert bytes(tokens) == b"user: hi\nassistant: hello"
    tokens = server.post("/tokenize", messages=messages, add_generation_prompt=False)[1]["tokens"]
    assert bytes(tokens) == b"user: hi\nassistant: hello\n"
    status, answer, _ = server.post(CHAT, messages=messages, continue_final_message=True)
    assert (status, answer["error"]["param"]) == (400, "continue_final_message")
    status, answer, _ = server.post(CHAT, messages=HI, chat_template_kwargs={"thinking": True})
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "thinking" in answer["error"]["message"]


def test_a_text_that_is_surely_too_long_is_refused_before_it_is_encoded(server: Live) -> None:
    status, answer, _ = server.post(prompt="x" * 5000, max_tokens=2)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert "at least 5000 tokens" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("prompt", "max_tokens"), [("x", 512), ([1] * 512, None), ([1] * 600, 1), ([1] * 500, 13)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_too_long(server: Live, prompt: Any, max_tokens: int | None, stream: bool) -> None:
    status, answer, _ = server.post(prompt=prompt, max_tokens=max_tokens, stream=stream)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert str(len(prompt)) in answer["error"]["message"]


def test_a_refusal_at_the_door_is_counted(server: Live) -> None:
    name = f'slosched:requests_ended_total{{model_name="{MODEL}",reason="too_long"}}'
    before = samples(server)[name]
    server.post(prompt="x", max_tokens=512)
    assert samples(server)[name] == before + 1


def test_the_small_endpoints(server: Live) -> None:
    assert server.get("/ping")[0] == server.post("/ping")[0] == 200
    assert json.loads(server.get("/version")[1])["version"].count(".") >= 1
    assert json.loads(server.get(f"/v1/models/{MODEL}")[1])["id"] == MODEL
    status, text = server.get("/v1/models/gpt-9")
    assert (status, json.loads(text)["error"]["code"]) == (404, "model_not_found")
    assert server.post("/detokenize", tokens=list(b"hi"))[1] == {"prompt": "hi"}
    status, answer, _ = server.post("/detokenize", tokens=[999])
    assert (status, answer["error"]["param"]) == (400, "tokens")


def test_the_id_of_a_request_is_echoed(server: Live) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    assert server.post(**body, headers={"x-request-id": "a1"})[2]["x-request-id"] == "a1"
    assert server.post(prompt="x", n=2, headers={"x-request-id": "b2"})[2]["x-request-id"] == "b2"
    ids = {server.post(**body)[2]["x-request-id"] for _ in range(2)}
    assert len(ids) == 2


def test_with_api_keys_only_who_has_one_is_served() -> None:
    body = {"prompt": "ab", "max_tokens": 2}
    with live(api_keys=("one", "two")) as closed:
        for header in (None, "Bearer three", "Bearer ", "Basic one", "one"):
            headers = {} if header is None else {"authorization": header}
            status, answer, _ = closed.post(**body, headers=headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for key in ("one", "two"):
            assert closed.post(**body, headers={"Authorization": f"Bearer {key}"})[0] == 200
        assert closed.get("/v1/models")[0] == closed.get("/steps")[0] == 401
        assert closed.get("/health")[0] == closed.get("/metrics")[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "/v1/embeddings/"])
def test_a_path_with_a_slash_at_its_end_is_an_unknown_one(server: Live, path: str) -> None:
    """It led clients to whatever host they had named."""
    status, answer, headers = server.post(path, prompt="x")
    assert (status, answer["error"]["code"]) == (404, "not_found")
    assert f"POST {path}: Not Found; no path here ends with a slash" in answer["error"]["message"]
    assert "location" not in headers


def test_unknown_model_path_and_method(server: Live) -> None:
    status, answer, _ = server.post(model="gpt-9", prompt="x")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "gpt-9" in answer["error"]["message"]
    assert server.post("/v1/embeddings", input="x")[0] == 404
    status, text = server.get("/v1/completions")
    assert status == 405
    error = json.loads(text)["error"]
    assert "GET /v1/completions" in error["message"]
    assert error["code"] == "method_not_allowed"


def test_what_is_missing_is_called_so(server: Live) -> None:
    assert "prompt is missing" in server.post()[1]["error"]["message"]
    assert "messages is missing" in server.post(CHAT)[1]["error"]["message"]


@pytest.mark.parametrize(
    ("field", "meant"), [("slo_ttft", "slo_ttft_ms"), ("slo_e2e_s", "slo_e2e_ms")]
)
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", {"prompt": "x"}), (CHAT, {"messages": HI})]
)
def test_a_promise_of_no_known_name_is_refused(
    server: Live, path: str, body: dict[str, Any], field: str, meant: str
) -> None:
    status, answer, _ = server.post(path, **body, **{field: 1})
    assert (status, answer["error"]["param"]) == (400, field)
    assert f"no promise {field!r} (did you mean {meant}?)" in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 10_000, b"1" * 5000],
)
def test_what_is_not_a_json_object(server: Live, body: bytes) -> None:
    status, answer = raw_post(server.url, body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"


def send_for_ever(
    server: Live, header: str, part: bytes
) -> tuple[http.client.HTTPResponse, Any, int]:
    """Return the response to a client that sends without end, and the bytes sent before it came."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=30) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n%b\r\n\r\n" % header.encode())
        num_sent = 0
        with suppress(OSError):  # it may close the connection between the check and the next send
            while not select.select([client], [], [], 0)[0]:
                client.sendall(part)
                num_sent += len(part)
        response = http.client.HTTPResponse(client)
        response.begin()
        return response, json.loads(response.read()), num_sent


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_body_without_end_is_refused_and_not_read(server: Live, is_chunked: bool) -> None:
    spaces = b" " * 2**16
    header, part = f"content-length: {10**12}", spaces
    if is_chunked:
        header, part = "transfer-encoding: chunked", b"10000\r\n%b\r\n" % spaces
    response, answer, num_sent = send_for_ever(server, header, part)
    assert (response.status, answer["error"]["code"]) == (413, "body_too_large")
    assert response.getheader("connection") == "close"
    assert num_sent < 2**25, "a MiB may be read, and the kernel holds some more"


def raw_post(url: str, body: bytes, path: str = "/v1/completions") -> tuple[int, Any]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(text) if is_json else text
    finally:
        connection.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 600) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from(
    ["prompt", "messages", "max_tokens", "stop", "temperature", "seed", "stream", "slo_ttft_ms"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.dictionaries(FIELDS, JSON, max_size=6), is_chat=st.booleans())
def test_any_body_is_served_or_refused(server: Live, body: dict[str, Any], is_chat: bool) -> None:
    path = CHAT if is_chat else "/v1/completions"
    status, _ = raw_post(server.url, json.dumps(body).encode(), path)
    assert status in (200, 400)
    assert server.worker.why_not_serving is None


def test_tokenize(server: Live) -> None:
    assert server.post("/tokenize", prompt="hi")[1] == {
        "tokens": [104, 105],
        "count": 2,
        "max_model_len": 512,
    }
    with live(max_model_len=100_000, num_blocks=25_000) as large:  # written in several parts
        tokens = large.post("/tokenize", prompt="ab" * 30_000)[1]["tokens"]
    assert tokens == [97, 98] * 30_000
    chat = server.post("/tokenize", messages=[{"role": "user", "content": "hi"}])[1]
    assert bytes(chat["tokens"]) == b"user: hi\nassistant: "


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, SLO(1.5, 0.25)),
        ({"x-slo-ttft-ms": "200"}, {}, SLO(0.2, 0.25)),
        ({"x-slo-ttft-ms": "200", "x-slo-tpot-ms": "12.5"}, {}, SLO(0.2, 0.0125)),
        ({"x-slo-ttft-ms": "200"}, {"slo_ttft_ms": 300}, SLO(0.3, 0.25)),
        ({"x-slo-ttft-ms": "garbage"}, {"slo_ttft_ms": 300}, SLO(0.3, 0.25)),
        ({"X-SLO-TPOT-MS": "40"}, {"slo_ttft_ms": "300"}, SLO(0.3, 0.04)),
        ({"x-llm-d-slo-ttft-ms": "200", "X-LLM-D-SLO-TPOT-MS": "40"}, {}, SLO(0.2, 0.04)),
        ({"x-llm-d-slo-ttft-ms": "200", "x-slo-ttft-ms": "garbage"}, {}, SLO(0.2, 0.25)),
        ({"x-llm-d-slo-ttft-ms": "200"}, {"slo_ttft_ms": 300}, SLO(0.3, 0.25)),
        ({}, {"slo_e2e_ms": 9000}, SLO(1.5, 0.25, 9.0)),
        ({"x-slo-e2e-ms": "8000"}, {}, SLO(1.5, 0.25, 8.0)),
        ({"x-slo-e2e-ms": "8000"}, {"slo_e2e_ms": 9000}, SLO(1.5, 0.25, 9.0)),
    ],
)
def test_the_slo_of_a_request(
    server: Live, headers: dict[str, str], body: dict[str, Any], expected: SLO
) -> None:
    _, answer, _ = server.post(prompt="x", max_tokens=2, headers=headers, **body)
    record = next(r for r in server.worker.records if r.request_id == answer["id"])
    assert record.slo == expected


@pytest.mark.parametrize(
    "name", ["x-slo-ttft-ms", "x-llm-d-slo-tpot-ms", "x-llm-d-inference-objective"]
)
def test_an_slo_header_that_comes_twice_is_refused(server: Live, name: str) -> None:
    """The first one held, and the client was not told."""
    headers = [(name, "500"), (name, "200")]
    status, answer, _ = server.post(prompt="x", max_tokens=2, headers=headers)
    assert (status, answer["error"]["param"]) == (400, name)
    assert f"the header {name} comes more than once" in answer["error"]["message"]
    others = [("x-odd", "1"), ("x-odd", "2")]
    assert server.post(prompt="x", max_tokens=2, headers=others)[0] == 200


def test_an_slo_header_that_comes_twice_is_refused_for_quotes_too(server: Live) -> None:
    url = f"{server.url}/v1/quote?prompt_tokens=10"

    async def status_of(headers: list[tuple[str, str]]) -> int:
        async with aiohttp.ClientSession() as client, client.get(url, headers=headers) as answer:
            return answer.status

    once = [("x-slo-ttft-ms", "500")]
    statuses = [asyncio.run(status_of(headers)) for headers in (once, 2 * once)]
    assert statuses == [501, 400]  # fcfs makes no quotes


@pytest.mark.parametrize("value", ["high", 1.5, True, 2**31, -(2**31) - 1, [1]])
def test_a_priority_that_is_none_is_a_400(server: Live, value: object) -> None:
    status, answer, _ = server.post(prompt="x", max_tokens=2, priority=value)
    assert (status, answer["error"]["param"]) == (400, "priority")
    assert "priority must be an integer in [-2147483648, 2147483647]" in answer["error"]["message"]


def test_lower_priorities_are_served_first_by_a_policy_that_looks_at_them() -> None:
    """One seat is taken while four more requests come."""

    async def scenario(client: aiohttp.ClientSession) -> None:
        asks = []
        for num_sent, priority in enumerate((0, 3, -7, 0, 2), start=1):
            body = {"prompt": "abc", "max_tokens": 2, "priority": priority}
            asks.append(asyncio.create_task(post(client, **body)))
            while urgent.worker.num_cut_short < num_sent or not urgent.device.entered.is_set():
                await asyncio.sleep(0.001)
        urgent.device.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*asks)] == [200] * 5

    with live(make_policy("vllm_v1:policy=priority"), limits=Limits(max_num_seqs=1)) as urgent:
        urgent.device.gate.clear()
        asyncio.run(with_client(urgent.url, scenario))
        assert [r.priority for r in urgent.worker.records] == [0, -7, 0, 2, 3]


def test_a_prompt_that_a_policy_does_not_cut_is_told_from_one_that_the_cache_cannot_hold() -> None:
    with live(make_policy("trtllm"), limits=Limits(max_num_batched_tokens=16)) as server:
        for stream in (False, True):
            status, answer, _ = server.post(prompt="x" * 40, max_tokens=2, stream=stream)
            assert (status, answer["error"]["reason"]) == (400, "too_long")
            assert answer["error"]["code"] == "context_length_exceeded"
            assert (
                "no prompt of 40 tokens where a step has at most 16" in answer["error"]["message"]
            )
        assert server.post(prompt="x" * 16, max_tokens=2)[0] == 200
    chunked = make_policy("trtllm:context_chunking_policy=first_come_first_served")
    with live(chunked, limits=Limits(max_num_batched_tokens=16)) as server:
        assert server.post(prompt="x" * 40, max_tokens=2)[0] == 200


def test_an_adapter_is_no_model_that_is_served(server: Live) -> None:
    status, answer, _ = server.post(prompt="x", max_tokens=2, model="sql-adapter")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "no model 'sql-adapter' here, only 'echo'" in answer["error"]["message"]
    assert "adapters" in answer["error"]["message"]


@pytest.mark.parametrize("header", ["x-slo-tpot-ms", "x-llm-d-slo-tpot-ms", "x-slo-e2e-ms"])
@pytest.mark.parametrize("value", ["-1", "0", "nan", "inf", "", "1s", "1e999"])
def test_a_wrong_slo_header_is_named_with_its_value(header: str, value: str) -> None:
    with pytest.raises(ApiError, match=f"^{header}") as caught:
        parse_slo({header: value}, {}, SLO(1, 1))
    assert caught.value.status == 400
    assert repr(value) in caught.value.message


def test_metrics_tell_promises_and_which_were_kept(server: Live) -> None:
    """An end-to-end time that cannot be met: the request finishes but does not count as good."""

    def counts() -> dict[str, float]:
        return {
            name: n for name, n in samples(server).items() if "promises" in name or good in name
        }

    good = "slosched:good_requests_total"
    before = counts()
    kept = {"slo_ttft_ms": 60_000, "slo_tpot_ms": 60_000}
    assert server.post(prompt="abcd", max_tokens=5, **kept, slo_e2e_ms=60_000)[0] == 200
    assert server.post(prompt="abcd", max_tokens=5, **kept, slo_e2e_ms=0.01)[0] == 200
    rise = {name: n - before[name] for name, n in counts().items()}
    label = f'model_name="{MODEL}"'
    assert rise == {
        f"{good}{{{label}}}": 1,
        f'slosched:promises_total{{{label},promise="ttft"}}': 2,
        f'slosched:promises_total{{{label},promise="tpot"}}': 2,
        f'slosched:promises_total{{{label},promise="e2e"}}': 2,
        f'slosched:promises_kept_total{{{label},promise="ttft"}}': 2,
        f'slosched:promises_kept_total{{{label},promise="tpot"}}': 2,
        f'slosched:promises_kept_total{{{label},promise="e2e"}}': 1,
    }


def test_metrics(server: Live) -> None:
    before = samples(server)
    server.post(prompt="abcd", max_tokens=5, slo_ttft_ms=60_000, slo_tpot_ms=60_000)
    after = samples(server)
    label = f'{{model_name="{MODEL}"}}'
    ended = f'slosched:requests_ended_total{{model_name="{MODEL}",reason="length"}}'
    assert after[ended] - before[ended] == 1
    tokens = f"vllm:generation_tokens_total{label}"
    assert after[tokens] - before[tokens] == 5
    good = f"slosched:good_requests_total{label}"
    assert after[good] - before[good] == 1
    ttft = f"vllm:time_to_first_token_seconds_count{label}"
    assert after[ttft] - before[ttft] == 1
    assert after[f"vllm:kv_cache_usage_perc{label}"] == 0
    assert after[f"vllm:num_requests_running{label}"] == 0


def samples(server: Live) -> dict[str, float]:
    status, text = server.get("/metrics")
    assert status == 200
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}
