"""The ASGI middleware for vLLM, around an app that answers as vLLM does."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest

from slosched.core import EndReason, Refusal
from slosched.integrations.vllm import SLOMiddleware
from slosched.integrations.vllm.middleware import _CHOICES, _FORMS, _WATCHED, _Answer
from slosched.integrations.vllm.slo import rejection

PATH = "/v1/chat/completions"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TOKEN = b'data: {"choices":[{"delta":{"content":"Hi"},"finish_reason":null}]}\n\n'
REJECTION = (
    b'data: {"choices":[{"delta":{"content":""},"finish_reason":"abort",'
    b'"stop_reason":"slo_rejected:infeasible"}]}\n\n'
)


class App:
    """An app that notes the request, then answers with `chunks`."""

    def __init__(self, *chunks: bytes, status: int = 200) -> None:
        self.chunks, self.status = chunks, status
        self.document: Any = None
        self.headers: dict[bytes, bytes] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.headers = dict(scope["headers"])
        body = (await receive())["body"]
        self.document = json.loads(body)
        assert int(self.headers[b"content-length"]) == len(body)
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def ask(
    app: Any,
    document: dict[str, Any] | None,
    settings: Any = None,
    prefix: str = "",
    path: str = PATH,
    engine: Any = None,
    **headers: str,
) -> list[dict[str, Any]]:
    """Return the messages sent to the client; the request comes in two pieces.

    `settings` are slosched's in the vLLM that the app belongs to, `prefix` is its `--root-path`.
    """
    body = json.dumps(document).encode()
    pieces = [
        {"type": "http.request", "body": body[:5], "more_body": True},
        {"type": "http.request", "body": body[5:], "more_body": False},
    ]
    pairs = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    pairs.append((b"content-length", b"%d" % len(body)))
    sent: list[dict[str, Any]] = []

    async def receive() -> Any:
        return pieces.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    config = SimpleNamespace(additional_config={"slosched": settings or {}})
    state = SimpleNamespace(vllm_config=config, engine_client=engine)
    server = SimpleNamespace(state=state)
    scope = {"type": "http", "path": prefix + path, "root_path": prefix}
    asyncio.run(SLOMiddleware(app)({**scope, "headers": pairs, "app": server}, receive, send))
    return sent


class Params:
    """Sampling parameters, as far as the middleware knows those of vLLM."""

    def __init__(self, extra_args: dict[str, Any] | None = None) -> None:
        self.extra_args = extra_args

    def clone(self) -> Params:
        return Params(self.extra_args)


class Engine:
    """An engine client whose outputs are these, each a number of tokens and a stop reason."""

    def __init__(self, *outputs: tuple[int, str | None]) -> None:
        self.outputs = outputs
        self.asked: list[dict[str, Any] | None] = []
        self.num_closed = 0

    async def generate(self, prompt: str, sampling_params: Params, request_id: str) -> Any:
        self.asked.append(sampling_params.extra_args)
        try:
            for num_tokens, why in self.outputs:
                each = SimpleNamespace(token_ids=[7] * num_tokens, stop_reason=why)
                yield SimpleNamespace(outputs=[each])
        finally:
            self.num_closed += 1


class Transcribes:
    """An app that asks its engine for the text of audio, and answers as vLLM does."""

    def __init__(self, engine: Engine, *, is_stream: bool = False, status: int = 200) -> None:
        self.engine, self.is_stream, self.status = engine, is_stream, status
        self.num_received = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        has_more = True
        while has_more:
            has_more = (await receive())["more_body"]
            self.num_received += 1
        start = {"type": "http.response.start", "status": self.status, "headers": []}
        if self.is_stream:
            await send(start)
        text = b""
        async for output in self.engine.generate("audio", Params(), "1"):
            text += b"x" * len(output.outputs[0].token_ids)
            if self.is_stream:
                await send({"type": "http.response.body", "body": text, "more_body": True})
        if not self.is_stream:
            await send(start)
        await send({"type": "http.response.body", "body": text, "more_body": False})


def transcribed(app: Transcribes, path: str, **headers: str) -> list[dict[str, Any]]:
    """Return the messages sent to a client whose body, in two pieces, is no JSON."""
    return ask(app, None, None, "", path, app.engine, **headers)


@pytest.mark.parametrize("path", sorted(_WATCHED))
@pytest.mark.parametrize("status", [200, 400])
def test_an_empty_text_or_an_error_of_a_refusal_is_a_429(path: str, status: int) -> None:
    engine = Engine(
        (0, rejection(EndReason.OVERLOAD, Refusal(EndReason.OVERLOAD, "TTFT", 1.8, 1.0, 7.5)))
    )
    sent = transcribed(Transcribes(engine, status=status), path, x_slo_ttft_ms="500")
    assert engine.asked == [{"slo_ttft_ms": 500.0}]
    assert [message.get("status") for message in sent] == [429, None]
    assert json.loads(sent[1]["body"])["error"]["retry_after_ms"] == 7500
    assert engine.num_closed == 1


def test_an_invalid_promise_for_audio_is_a_400() -> None:
    engine = Engine((0, "slo_invalid:no such tier"))
    sent = transcribed(Transcribes(engine), "/v1/audio/translations")
    assert sent[0]["status"] == 400
    assert json.loads(sent[1]["body"])["error"]["message"] == "no such tier"
    sent = transcribed(Transcribes(engine), "/v1/audio/translations", x_slo_ttft_ms="soon")
    assert sent[0]["status"] == 400


def test_a_stream_of_text_is_held_back_until_its_first_token_only() -> None:
    refused = Engine((0, "slo_rejected:overload"))
    sent = transcribed(Transcribes(refused, is_stream=True), "/v1/audio/transcriptions")
    assert [message.get("status") for message in sent] == [429, None]
    cut_short = Engine((1, None), (2, None), (0, "slo_rejected:overload"))
    sent = transcribed(Transcribes(cut_short, is_stream=True), "/v1/audio/transcriptions")
    assert [message.get("body") for message in sent] == [None, b"x", b"xxx", b"xxx", b"xxx"]


def test_audio_is_handed_on_as_it_comes_and_silence_is_no_refusal() -> None:
    app = Transcribes(Engine((0, None)))
    sent = transcribed(app, "/v1/audio/transcriptions")
    assert [message.get("status") for message in sent] == [200, None]
    assert app.num_received == 2
    assert app.engine.asked == [None]


def test_requests_that_are_not_watched_ask_the_engine_as_ever() -> None:
    engine = Engine((0, "slo_rejected:overload"))
    transcribed(Transcribes(engine), "/generative_scoring", x_slo_ttft_ms="500")
    sent = transcribed(Transcribes(engine), "/v1/embeddings", x_slo_ttft_ms="500")
    assert engine.asked == [{"slo_ttft_ms": 500.0}, None]
    assert sent[0]["status"] == 200


def test_headers_become_fields_and_the_bodys_own_word_goes_first() -> None:
    app = App(TOKEN)
    asked = {"stream": True, "vllm_xargs": {"slo_tpot_ms": 30, "other": "x"}}
    ask(app, asked, x_slo_ttft_ms="500", x_slo_tpot_ms="90")
    assert app.document == {
        "stream": True,
        "vllm_xargs": {"slo_ttft_ms": 500.0, "slo_tpot_ms": 30.0, "other": "x"},
    }


def test_what_is_wrong_is_told_to_its_end_whatever_it_quotes() -> None:
    why = """slo_tier "it's \\\\ ü" is none of this server's tiers: gold"""
    choice = {"finish_reason": "abort", "stop_reason": f"slo_invalid:{why}"}
    for is_ascii in (False, True):  # JSON may have it either way
        answer = json.dumps({"choices": [choice]}, ensure_ascii=is_ascii).encode()
        start, body = ask(App(answer), {"prompt": "x"})
        assert start["status"] == 400
        assert json.loads(body["body"])["error"]["message"] == why


def test_paths_under_the_root_path_of_the_server_are_the_same_paths() -> None:
    app = App(REJECTION)
    start, _ = ask(app, {"stream": True}, prefix="/llm", x_slo_ttft_ms="500")
    assert app.document["vllm_xargs"] == {"slo_ttft_ms": 500.0}
    assert start["status"] == 429


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/batch", "/v1/responses", "/v1/messages", "/invocations"]
)
def test_every_endpoint_for_text_knows_slo_and_tenant(path: str) -> None:
    app = App(b"{}")
    digest = sha256(b"sk").hexdigest()
    settings = {"tenants": {"acme": {"key_sha256": digest}}}
    headers = {"x_slo_ttft_ms": "500", "authorization": "Bearer sk"}
    ask(app, {"on_infeasible": "serve"}, settings, path=path, **headers)
    assert app.document["vllm_xargs"] == {
        "slo_ttft_ms": 500.0,
        "on_infeasible": "serve",
        "slo_tenant": digest,
    }


def test_where_vllm_takes_tokens_the_slo_is_among_the_sampling_params() -> None:
    path = "/inference/v1/generate"
    app = App(REJECTION)
    sampling = {"n": 1, "extra_args": {"slo_tpot_ms": 30}}
    asked = {"token_ids": [1], "sampling_params": sampling, "on_infeasible": "serve"}
    start, _ = ask(app, asked, path=path, x_slo_ttft_ms="500")
    promised = {"slo_ttft_ms": 500.0, "slo_tpot_ms": 30.0, "on_infeasible": "serve"}
    assert app.document["sampling_params"] == {"n": 1, "extra_args": promised}
    assert start["status"] == 429
    for incomplete in ({}, {"sampling_params": None}):  # vLLM says what is missing
        ask(app, incomplete, path=path, x_slo_ttft_ms="500")
        assert app.document == incomplete


EMPTY_RESPONSE = b'{"status":"completed","usage":{"input_tokens":9,"output_tokens":0}}'
RESPONSE_BEGIN = b'event: response.created\ndata: {"response":{"usage":null}}\n\n'
ITEM = b'event: response.output_item.added\ndata: {"item":{"content":[]}}\n\n'
EMPTY_MESSAGE = b'{"type":"message","usage":{"input_tokens":9,"output_tokens":0}}'
MESSAGE_BEGIN = b'event: message_start\ndata: {"message":' + EMPTY_MESSAGE + b"}\n\n"
BLOCK = b'event: content_block_start\ndata: {"content_block":{"text":""}}\n\n'


@pytest.mark.parametrize(
    ("path", "chunks"),
    [
        ("/v1/responses", [EMPTY_RESPONSE]),
        (
            "/v1/responses",
            [RESPONSE_BEGIN, b"event: response.completed\ndata: " + EMPTY_RESPONSE + b"\n\n"],
        ),
        ("/v1/messages", [EMPTY_MESSAGE]),
        (
            "/v1/messages",
            [MESSAGE_BEGIN, b'event: message_delta\ndata: {"usage":{"output_tokens":0}}\n\n'],
        ),
        ("/v1/chat/completions/batch", [REJECTION]),
    ],
)
def test_an_answer_without_a_token_is_a_429_at_every_endpoint(
    path: str, chunks: list[bytes]
) -> None:
    start, body = ask(App(*chunks), {}, path=path)
    assert start["status"] == 429
    assert json.loads(body["body"])["error"]["type"] == "slo_rejected"


@pytest.mark.parametrize(
    ("path", "chunks"),
    [
        ("/v1/responses", [EMPTY_RESPONSE.replace(b":0", b":10")]),
        ("/v1/responses", [b'{"status":"queued","usage":null}']),
        ("/v1/responses", [RESPONSE_BEGIN, b"event: error\ndata: {}\n\n"]),
        ("/v1/messages", [EMPTY_MESSAGE.replace(b":0", b":1")]),
        ("/v1/messages", [MESSAGE_BEGIN, b"event: error\ndata: {}\n\n"]),
        # Its only token has no text.
        (
            "/v1/messages",
            [MESSAGE_BEGIN, b'event: message_delta\ndata: {"usage":{"output_tokens":1}}\n\n'],
        ),
    ],
)
def test_any_other_answer_goes_through_at_every_endpoint(path: str, chunks: list[bytes]) -> None:
    start, *bodies = ask(App(*chunks), {}, path=path)
    assert start["status"] == 200
    assert [body["body"] for body in bodies if body["body"]] == chunks


@pytest.mark.parametrize(
    ("path", "begin", "token"),
    [("/v1/responses", RESPONSE_BEGIN, ITEM), ("/v1/messages", MESSAGE_BEGIN, BLOCK)],
)
def test_events_go_through_as_they_come_from_the_first_token_on(
    path: str, begin: bytes, token: bytes
) -> None:
    sent: list[Any] = []

    async def answer() -> None:
        async def send(message: Any) -> None:
            sent.append(message)

        to_client = _Answer(send, _FORMS[path])
        await to_client({"type": "http.response.start", "status": 200, "headers": []})
        await to_client({"type": "http.response.body", "body": begin, "more_body": True})
        assert not sent
        await to_client({"type": "http.response.body", "body": token, "more_body": True})
        assert [message.get("body") for message in sent] == [None, begin, token]

    asyncio.run(answer())


@pytest.mark.parametrize(
    ("said", "asked"), [({}, "relegate"), ({"on_infeasible": "serve"}, "serve")]
)
def test_what_becomes_of_a_late_request_may_be_said_as_to_our_server(
    said: dict[str, str], asked: str
) -> None:
    app = App(TOKEN)
    ask(app, {"on_infeasible": "relegate", "vllm_xargs": said})
    assert app.document["vllm_xargs"] == {"on_infeasible": asked}
    silent = {"on_infeasible": None}  # vLLM would refuse a field without a value among its own
    ask(app, silent)
    assert app.document == silent


def test_the_headers_of_llm_d_go_before_the_old_ones() -> None:
    app = App(TOKEN)
    headers = {"x_llm_d_slo_ttft_ms": "200", "x_slo_ttft_ms": "500", "x_slo_e2e_ms": "9000"}
    ask(app, {"prompt": "x"}, x_llm_d_slo_tpot_ms="40", **headers)
    assert app.document["vllm_xargs"] == {
        "slo_ttft_ms": 200.0,
        "slo_tpot_ms": 40.0,
        "slo_e2e_ms": 9000.0,
    }


def test_a_promise_of_a_name_that_does_not_exist_is_a_bad_request() -> None:
    app = App(TOKEN)
    start, body = ask(app, {"prompt": "x", "vllm_xargs": {"slo_ttft": 5, "slo_tier": "gold"}})
    assert start["status"] == 400
    message = json.loads(body["body"])["error"]["message"]
    assert "no promise 'slo_ttft' (did you mean slo_ttft_ms?)" in message
    assert app.document is None


def test_without_headers_a_request_is_left_as_it_is() -> None:
    app = App(TOKEN)
    ask(app, {"prompt": "x", "vllm_xargs": {"slo_tpot_ms": "30"}})
    assert app.document == {"prompt": "x", "vllm_xargs": {"slo_tpot_ms": "30"}}


@pytest.mark.parametrize("body", [b"{", b"[1]", b'"x"', b'{"vllm_xargs": [1]}', b"[" * 100_000])
def test_a_body_that_is_none_is_left_to_vllm(body: bytes) -> None:
    came: list[bytes] = []

    async def app(_scope: Any, receive: Any, _send: Any) -> None:
        came.append((await receive())["body"])

    async def receive() -> Any:
        return {"type": "http.request", "body": body}

    async def send(_message: Any) -> None: ...

    asyncio.run(SLOMiddleware(app)({"type": "http", "path": PATH, "headers": []}, receive, send))
    assert came == [body]


DIGESTS = {name: sha256(f"sk-{name}".encode()).hexdigest() for name in ("acme", "beta")}
TENANTS = {
    "tenants": {
        "acme": {"key_sha256": DIGESTS["acme"], "slo_tier": "gold"},
        "beta": {"key_sha256": DIGESTS["beta"]},
    }
}


@pytest.mark.parametrize(
    ("authorization", "fields"),
    [
        ("Bearer sk-acme", {"slo_tenant": DIGESTS["acme"], "slo_tier": "gold"}),
        ("bearer  sk-beta", {"slo_tenant": DIGESTS["beta"]}),
        ("Basic sk-acme", {}),
        ("Bearer sk-unknown", {}),
    ],
)
def test_a_key_says_who_asks_and_nothing_else_does(
    authorization: str, fields: dict[str, str]
) -> None:
    app = App(TOKEN)
    claimed = {"vllm_xargs": {"slo_tenant": "other", "x": 1}}
    ask(app, claimed, TENANTS, authorization=authorization, x_llm_d_inference_fairness_id="other")
    assert app.document["vllm_xargs"] == {"x": 1, **fields}
    assert "sk-" not in json.dumps(app.document)


def test_a_request_of_a_tenant_may_name_another_tier() -> None:
    app = App(TOKEN)
    asked = {"vllm_xargs": {"slo_tier": "batch"}}
    ask(app, asked, TENANTS, authorization="Bearer sk-acme")
    assert app.document["vllm_xargs"] == {"slo_tier": "batch", "slo_tenant": DIGESTS["acme"]}


def test_without_keys_the_header_of_llm_d_says_who_asks() -> None:
    app = App(TOKEN)
    ask(app, {}, x_llm_d_inference_fairness_id="acme", authorization="Bearer sk-acme")
    assert app.document["vllm_xargs"] == {"slo_tenant": "acme"}


@pytest.mark.parametrize("value", ["-5", "soon", "inf"])
def test_a_promise_that_cannot_be_read_is_a_bad_request(value: str) -> None:
    app = App(TOKEN)
    start, body = ask(app, {"prompt": "x"}, x_slo_ttft_ms=value)
    assert start["status"] == 400
    assert "slo_ttft_ms must be a positive" in json.loads(body["body"])["error"]["message"]
    assert app.document is None


def test_an_slo_header_that_comes_twice_is_a_bad_request() -> None:
    app = App(TOKEN)
    twice = {"x-slo-ttft-ms": "500", "x_slo_ttft_ms": "200"}  # the same name when it is sent
    start, body = ask(app, {"prompt": "x"}, **twice)
    assert start["status"] == 400
    assert "x-slo-ttft-ms comes more than once" in json.loads(body["body"])["error"]["message"]
    assert app.document is None


def test_a_rejected_stream_is_a_429_although_vllm_had_begun_it() -> None:
    start, body = ask(App(ROLE, REJECTION, b"data: [DONE]\n\n"), {"stream": True})
    assert start["status"] == 429
    assert dict(start["headers"])[b"retry-after"] == b"1"
    assert json.loads(body["body"])["error"]["type"] == "slo_rejected"
    assert "infeasible" in json.loads(body["body"])["error"]["message"]


def test_a_rejection_by_a_door_says_what_is_expected_and_when_to_come_again() -> None:
    overload = Refusal(EndReason.OVERLOAD, "TTFT", 1.834, 1.0, 7.5)
    start, body = ask(App(stopped(rejection(overload.reason, overload))), {})
    error = json.loads(body["body"])["error"]
    assert dict(start["headers"])[b"retry-after"] == b"8"
    assert (error["expected_ms"], error["promised_ms"], error["retry_after_ms"]) == (
        1834,
        1000,
        7500,
    )
    assert "overload" in error["message"]
    assert "come again in 7.5 s" in error["message"]


def test_nobody_is_told_to_come_again_with_what_can_never_be_kept() -> None:
    never = Refusal(EndReason.UNKEEPABLE, "TPOT", 0.02, 0.01, None)
    start, _ = ask(App(stopped(rejection(never.reason, never))), {})
    assert start["status"] == 429
    assert b"retry-after" not in dict(start["headers"])


def stopped(stop_reason: str) -> bytes:
    """Return vLLM's answer to a request that was ended for this reason."""
    choice = {"text": "", "finish_reason": "abort", "stop_reason": stop_reason}
    return json.dumps({"choices": [choice]}).encode()


def test_a_stream_that_ends_before_its_first_token_was_rejected() -> None:
    usage = b'data: {"choices":[],"usage":{"completion_tokens":0}}\n\n'
    start, body = ask(App(ROLE, usage, b"data: [DONE]\n\n"), {"stream": True})
    assert start["status"] == 429
    assert "before the first token" in json.loads(body["body"])["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", PATH])
def test_a_beam_search_that_was_refused_is_a_429(path: str) -> None:
    """vLLM 0.32 and 0.33 give one beam without text then, and no reason."""
    start, body = ask(App(beam("", "abort", path)), {"use_beam_search": True, "n": 2}, path=path)
    assert start["status"] == 429
    assert json.loads(body["body"])["error"]["type"] == "slo_rejected"


@pytest.mark.parametrize(("text", "reason"), [("Hi", "length"), ("Hi", "abort"), ("", "stop")])
def test_any_other_beam_goes_through(text: str, reason: str) -> None:
    for path in ("/v1/completions", PATH):
        sent = ask(App(beam(text, reason, path)), {"use_beam_search": True, "n": 2}, path=path)
        assert sent[0]["status"] == 200
        assert sent[1]["body"] == beam(text, reason, path)


def test_an_empty_answer_that_an_operator_ended_goes_through() -> None:
    """A pause of vLLM ends requests as well, and the client goes on from what it has."""
    for document in ({}, {"use_beam_search": False}, {"user": '"use_beam_search"'}):
        start, *_ = ask(App(beam("", "abort", PATH)), document)
        assert start["status"] == 200


def beam(text: str, finish_reason: str, path: str) -> bytes:
    """Return an answer of one choice that does not say why it ended."""
    said: dict[str, Any] = {"text": text}
    if path == PATH:
        said = {"message": {"role": "assistant", "content": text, "refusal": None}}
    choice = {"index": 0, **said, "finish_reason": finish_reason, "stop_reason": None}
    return json.dumps({"id": "x", "choices": [choice], "usage": {"prompt_tokens": 7}}).encode()


def test_an_error_within_a_stream_goes_through() -> None:
    error = b'data: {"error":{"message":"Internal server error","code":500}}\n\n'
    sent = ask(App(ROLE, error, b"data: [DONE]\n\n"), {"stream": True})
    assert sent[0]["status"] == 200
    assert sent[2]["body"] == error


def test_a_stream_goes_through_as_it_comes_from_its_first_token_on() -> None:
    sent = ask(App(ROLE, TOKEN, TOKEN, b"data: [DONE]\n\n"), {"stream": True})
    assert sent[0]["status"] == 200
    assert [message["body"] for message in sent[1:]] == [
        *(ROLE, TOKEN, TOKEN, b"data: [DONE]\n\n", b"")
    ]


EMPTY = b'data: {"choices":[{"index":0,"text":"","finish_reason":null,"stop_reason":null}]}\n\n'


def test_a_stream_of_tokens_without_text_goes_through_as_it_comes() -> None:
    """A client can ask for nothing but special tokens, which are not shown."""
    for first in ((), (ROLE,)):
        chunks = (*first, EMPTY, EMPTY, b"data: [DONE]\n\n")
        sent = ask(App(*chunks), {"stream": True})
        assert sent[0]["status"] == 200
        assert [message["body"] for message in sent[1:]] == [*chunks, b""]


def test_what_is_held_back_is_not_read_again_with_each_event() -> None:
    """Else one stream would take minutes of the event loop that answers all clients."""
    num_read = 0

    class Counting(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            nonlocal num_read
            num_read += key == "body"
            return super().get(key, default)

    async def play() -> None:
        async def send(_message: Any) -> None:
            raise AssertionError("nothing can be sent before it is known what it is")

        answer = _Answer(send, _CHOICES)
        await answer({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(1000):
            await answer(Counting(type="http.response.body", body=ROLE, more_body=True))

    asyncio.run(play())
    assert num_read <= 3000


def test_an_error_of_vllm_goes_through() -> None:
    sent = ask(App(b"no such model", status=404), {"prompt": "x"})
    assert [sent[0]["status"], sent[1]["body"]] == [404, b"no such model"]


def test_an_invalid_promise_found_by_the_scheduler_is_a_bad_request() -> None:
    answer = b'{"choices":[{"finish_reason":"abort","stop_reason":"slo_invalid:slo_tier is bad"}]}'
    start, body = ask(App(answer), {"prompt": "x"})
    assert start["status"] == 400
    assert json.loads(body["body"])["error"]["message"] == "slo_tier is bad"


QUOTE = {"object": "quote", "prompt_tokens": 7}


class EngineCore:
    """What vLLM's client of an engine core is to the middleware: calls, and their answers."""

    def __init__(self, answer: object = QUOTE, num_engines: int = 1) -> None:
        self.answer, self.core_engines = answer, [b"engine"] * num_engines
        self.asked: list[object] = []

    async def call_utility_async(self, method: str, *arguments: object) -> str:
        self.asked.append((method, *arguments))
        return json.dumps(self.answer)


def ask_quotes(
    core: EngineCore, query: str, *, status: int = 404, scheduler: str | None = "SLOScheduler"
) -> tuple[int, Any]:
    """Ask for quotes where vLLM itself answers `status`; return what the client gets."""
    sent: list[Any] = []

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"detail": "of vLLM"}'})

    async def receive() -> Any:
        raise AssertionError("a question has no body")

    async def send(message: Any) -> None:
        sent.append(message)

    config = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=4096),
        scheduler_config=SimpleNamespace(scheduler_cls=scheduler),
    )
    client = SimpleNamespace(engine_core=core)
    server = SimpleNamespace(state=SimpleNamespace(vllm_config=config, engine_client=client))
    scope = {"type": "http", "path": "/v1/quote", "headers": [], "app": server}
    asyncio.run(SLOMiddleware(app)({**scope, "query_string": query.encode()}, receive, send))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    return sent[0]["status"], json.loads(sent[1]["body"])


def test_a_question_for_quotes_is_answered_by_the_engine_core() -> None:
    core = EngineCore()
    assert ask_quotes(core, "prompt_tokens=7,4095") == (200, QUOTE)
    assert core.asked == [("slosched_quotes", [7, 4095], {})]


def test_a_question_for_quotes_may_name_a_promise() -> None:
    core = EngineCore()
    asked = {"slo_ttft_ms": "500", "slo_tier": "gold"}
    assert ask_quotes(core, "prompt_tokens=7&slo_ttft_ms=500&slo_tier=gold") == (200, QUOTE)
    assert core.asked == [("slosched_quotes", [7], asked)]


def test_whom_vllm_does_not_let_in_gets_no_quote() -> None:
    core = EngineCore()
    assert ask_quotes(core, "prompt_tokens=7", status=401) == (401, {"detail": "of vLLM"})
    assert not core.asked


@pytest.mark.parametrize(
    ("query", "why"),
    [
        ("", "say how long the prompt is"),
        ("prompt_tokens=4096", "must be an integer from 1 to 4095"),
        ("prompt_tokens=" + "1," * 20, "at most 16 lengths"),
    ],
)
def test_a_wrong_question_for_quotes_is_a_bad_request(query: str, why: str) -> None:
    status, document = ask_quotes(EngineCore(), query)
    assert status == 400
    assert why in document["error"]["message"]


def test_where_nobody_can_quote_the_answer_says_why() -> None:
    for core, scheduler, why in (
        (EngineCore({"error": {"message": "no door", "code": 501}}), "SLOScheduler", "no door"),
        (EngineCore(num_engines=2), "SLOScheduler", "data parallelism"),
        (EngineCore(), None, "vLLM's own scheduler"),
    ):
        status, document = ask_quotes(core, "prompt_tokens=7", scheduler=scheduler)
        assert status == 501
        assert why in document["error"]["message"]
