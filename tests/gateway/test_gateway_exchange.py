"""What becomes of a request at which one replica after the other breaks off."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from slosched.gateway.forward import pass_on
from slosched.gateway.gateway import Gateway
from slosched.gateway.metrics import End

BODY = json.dumps({"model": "fragile", "prompt": "break", "max_tokens": 4}).encode()


class Compressing:
    """A server that compresses a stream, if its client takes that, as some proxies do.

    It sends the second event once `has_come` says that the first one has.
    """

    def __init__(self) -> None:
        self.has_come = asyncio.Event()
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/completions", self._stream)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fragile"}]})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        compresses = "gzip" in request.headers.get("accept-encoding", "")
        if compresses:
            answer.headers["content-encoding"] = "gzip"
        await answer.prepare(request)
        packer = zlib.compressobj(wbits=31)

        def packed(event: bytes) -> bytes:
            if not compresses:
                return event
            return packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH)

        await answer.write(packed(b"data: 1\n\n"))
        async with asyncio.timeout(10):
            await self.has_come.wait()
        await answer.write(packed(b"data: 2\n\n"))
        return answer


class Fragile:
    """A server that closes the connection as soon as it has read a request for text."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_post("/v1/completions", self._break)
        self.app.router.add_post("/v1/chat/completions", self._break_in_an_event)

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fragile"}]})

    async def _break(self, request: web.Request) -> web.Response:
        await request.read()
        self.num_asked += 1
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async def _break_in_an_event(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices": []}\n\ndata: {"cho')
        assert request.transport is not None
        request.transport.close()
        return answer


async def started(app: web.Application) -> tuple[web.AppRunner, str]:
    """Serve on a free port; return what stops it, and its URL."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


@asynccontextmanager
async def in_front_of(*servers: Fragile) -> AsyncIterator[Gateway]:
    """Run a gateway in front of servers."""
    runners, urls = zip(*[await started(each.app) for each in servers], strict=True)
    gateway = Gateway(urls, "round_robin")
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.stop()
        for runner in runners:
            await runner.cleanup()


async def ask(
    gateway: Gateway,
    path: str = "/v1/completions",
    *headers: tuple[bytes, bytes],
    content: bytes = BODY,
    on_start: Callable[[list[tuple[bytes, bytes]]], None] = lambda _headers: None,
    on_body: Callable[[bytes], None] = lambda _body: None,
) -> tuple[int, bytes]:
    """Post `content` through the gateway; return the status and the body of the answer.

    `on_start` gets the headers of the answer, and `on_body` each piece of the body as it comes.
    """
    sent: list[MutableMapping[str, Any]] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), *headers],
    }
    parts: list[MutableMapping[str, Any]] = [
        {"type": "http.request", "body": content, "more_body": False}
    ]
    never = asyncio.Event()

    async def receive() -> MutableMapping[str, Any]:
        if not parts:
            await never.wait()
        return parts.pop()

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)
        if message["type"] == "http.response.start":
            on_start(message["headers"])
        if message["type"] == "http.response.body":
            on_body(message["body"])

    await gateway.app(scope, receive, send)
    body = b"".join(m.get("body", b"") for m in sent)
    return sent[0]["status"], body


def code_of(body: bytes) -> str:
    """Return the code of an error."""
    code = json.loads(body)["error"]["code"]
    assert isinstance(code, str)
    return code


def test_a_request_that_breaks_servers_breaks_no_more_than_two() -> None:
    async def play() -> tuple[tuple[int, bytes], list[int]]:
        fragile = [Fragile() for _ in range(4)]
        async with in_front_of(*fragile) as gateway:
            return await ask(gateway), [each.num_asked for each in fragile]

    (status, body), num_asked = asyncio.run(play())
    assert (status, code_of(body)) == (502, "replica_failed")
    assert sorted(num_asked) == [0, 0, 1, 1]


def test_a_server_that_cannot_be_reached_counts_as_nothing_broken() -> None:
    async def play() -> tuple[tuple[int, bytes], int]:
        gone = [await started(Fragile().app) for _ in range(3)]
        last = Fragile()
        runner, url = await started(last.app)
        gateway = Gateway([*(other for _, other in gone), url], "round_robin")
        await gateway.start()
        for stopped, _ in gone:
            await stopped.cleanup()
        try:
            return await ask(gateway), last.num_asked
        finally:
            await gateway.stop()
            await runner.cleanup()

    (status, body), num_asked = asyncio.run(play())
    assert (status, code_of(body), num_asked) == (502, "replica_failed", 1)


def test_events_come_at_once_although_client_and_server_can_compress() -> None:
    async def play() -> tuple[int, bytes]:
        server = Compressing()
        runner, url = await started(server.app)
        gateway = Gateway([url], "round_robin")
        await gateway.start()
        takes_gzip = (b"accept-encoding", b"gzip, deflate")
        try:
            return await ask(
                gateway,
                "/v1/completions",
                takes_gzip,
                on_body=lambda body: server.has_come.set() if body else None,
            )
        finally:
            await gateway.stop()
            await runner.cleanup()

    assert asyncio.run(play()) == (200, b"data: 1\n\ndata: 2\n\n")


def test_of_an_event_that_breaks_off_the_client_sees_nothing() -> None:
    async def play() -> tuple[int, bytes]:
        async with in_front_of(Fragile()) as gateway:
            return await ask(gateway, "/v1/chat/completions")

    status, body = asyncio.run(play())
    first, error, done, rest = body.decode().split("\n\n")
    assert (status, first, done, rest) == (200, 'data: {"choices": []}', "data: [DONE]", "")
    assert code_of(error.removeprefix("data: ").encode()) == "replica_failed"


class Refusing:
    """A server that would be in time, as it says, and then refuses every request."""

    def __init__(self, retry_after: str | None) -> None:
        self._headers = {} if retry_after is None else {"retry-after": retry_after}
        self.num_asked = 0
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self._models)
        self.app.router.add_get("/v1/quote", self._quote)
        self.app.router.add_post("/v1/responses", self._refuse)

    async def _models(self, _request: web.Request) -> web.Response:
        model = {"id": "fragile", "max_model_len": 4096}
        return web.json_response({"object": "list", "data": [model]})

    async def _quote(self, request: web.Request) -> web.Response:
        times_ms = {"p10": 1.0, "p50": 1.0, "p90": 1.0, "p99": 1.0}
        quotes = [
            {
                "prompt_tokens": int(length),
                "ttft_ms": times_ms,
                "tpot_ms": times_ms,
                "alone_ms": {"ttft": 1.0, "tpot": 1.0},
                "promised_ms": {"ttft": None, "tpot": None, "e2e": None},
                "num_requests_running": 0,
                "num_requests_waiting": 0,
            }
            for length in request.query["prompt_tokens"].split(",")
        ]
        return web.json_response({"object": "list", "data": quotes})

    async def _refuse(self, request: web.Request) -> web.Response:
        await request.read()
        self.num_asked += 1
        error = {"code": f"refused until {self._headers.get('retry-after')}"}
        return web.json_response({"error": error}, status=429, headers=self._headers)


@pytest.mark.parametrize("told", [("9", "2", None), (None, "2", "9"), ("2", None, "9")])
def test_of_several_refusals_the_client_gets_the_one_with_the_shortest_wait(
    told: tuple[str | None, ...],
) -> None:
    async def play() -> tuple[tuple[int, bytes], list[int]]:
        refusing = [Refusing(retry_after) for retry_after in told]
        runners, urls = zip(*[await started(each.app) for each in refusing], strict=True)
        gateway = Gateway(urls, "round_robin")
        await gateway.start()
        try:
            return await ask(gateway, "/v1/responses"), [each.num_asked for each in refusing]
        finally:
            await gateway.stop()
            for runner in runners:
                await runner.cleanup()

    (status, body), num_asked = asyncio.run(play())
    assert (status, code_of(body), num_asked) == (429, "refused until 2", [1, 1, 1])


class OddHeaders(Fragile):
    """A server whose answers have headers that no answer should have."""

    async def _break(self, request: web.Request) -> web.Response:
        await request.read()
        assert request.transport is not None
        request.transport.write(
            b"HTTP/1.1 429 Odd\r\nretry-after: 1000000000000\r\nx-odd: a\x0bb\r\nx-mine: a\r\n"
            b"content-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
        )
        request.transport.close()
        return web.Response()


def test_headers_that_no_answer_should_have_go_no_further() -> None:
    async def play() -> tuple[int, bytes]:
        async with in_front_of(OddHeaders()) as gateway:
            return await ask(gateway, on_start=headers.extend)

    headers: list[tuple[bytes, bytes]] = []
    assert asyncio.run(play()) == (429, b"{}")
    told = dict(headers)
    assert (told[b"retry-after"], told[b"x-mine"]) == (b"3600", b"a")
    assert b"x-odd" not in told


class Unwilling(Fragile):
    """A server that answers every request for a completion with the same 503."""

    def __init__(self, error: object) -> None:
        super().__init__()
        self._error = error

    async def _break(self, request: web.Request) -> web.Response:
        await request.read()
        self.num_asked += 1
        return web.json_response(self._error, status=503)


@pytest.mark.parametrize(
    ("error", "is_up"),
    [
        ({"error": {"code": "grammars_busy"}}, True),
        ({"error": {"code": "too_many_requests"}}, True),
        ({"error": {"code": "too_many_connections"}}, True),
        ({"error": {"code": "not_serving"}}, False),
        ({"error": {"code": ["grammars_busy"]}}, False),
        ({"error": "overloaded"}, False),
        ([], False),
    ],
)
def test_a_server_with_too_many_requests_of_a_kind_goes_on_to_get_others(
    error: object, is_up: bool
) -> None:
    async def play() -> None:
        unwilling = [Unwilling(error) for _ in range(2)]
        runners, urls = zip(*[await started(each.app) for each in unwilling], strict=True)
        gateway = Gateway(urls, "round_robin")
        await gateway.start()
        replicas = gateway.fleet.replicas
        try:
            status, body = await ask(gateway)
            assert (status, json.loads(body)) == (503, error)
            assert [each.num_asked for each in unwilling] == [1, 1]
            assert replicas[-1].is_up == is_up  # the first has been asked again since
            assert [gateway.metrics.failed[each] for each in replicas] == [1, 1]
        finally:
            await gateway.stop()
            for runner in runners:
                await runner.cleanup()

    asyncio.run(play())


def test_an_slo_header_that_comes_twice_is_refused() -> None:
    async def play() -> tuple[tuple[int, bytes], int]:
        fragile = Fragile()
        headers = [(b"x-slo-ttft-ms", b"500"), (b"x-slo-ttft-ms", b"200")]
        async with in_front_of(fragile) as gateway:
            return await ask(gateway, "/v1/completions", *headers), fragile.num_asked

    (status, body), num_asked = asyncio.run(play())
    assert (status, num_asked) == (400, 0)
    assert "the header x-slo-ttft-ms comes more than once" in json.loads(body)["error"]["message"]


def test_a_compressed_body_is_told_that_none_is_taken() -> None:
    async def play() -> tuple[tuple[int, bytes], int]:
        fragile = Fragile()
        content, said = zlib.compress(BODY), (b"content-encoding", b"deflate")
        async with in_front_of(fragile) as gateway:
            return await ask(gateway, "/v1/completions", said, content=content), fragile.num_asked

    (status, body), num_asked = asyncio.run(play())
    assert (status, code_of(body), num_asked) == (415, "unsupported_encoding", 0)


def test_a_path_with_a_slash_at_its_end_is_an_unknown_one() -> None:
    async def play() -> tuple[tuple[int, bytes], int]:
        fragile = Fragile()
        async with in_front_of(fragile) as gateway:
            return await ask(gateway, "/v1/completions/"), fragile.num_asked

    (status, body), num_asked = asyncio.run(play())
    assert (status, code_of(body), num_asked) == (404, "not_found", 0)


@pytest.mark.parametrize("header", [b"a\x01b", b"\x7f", b"a\x00"])
def test_a_header_that_cannot_be_passed_on_is_the_clients_error(header: bytes) -> None:
    async def play() -> None:
        fragile = Fragile()
        runner, url = await started(fragile.app)
        gateway = Gateway([url], "round_robin")
        await gateway.start()
        try:
            status, body = await ask(gateway, "/v1/completions", (b"x-odd", header))
            assert (status, fragile.num_asked) == (400, 0)
            assert "x-odd has control characters" in json.loads(body)["error"]["message"]
            assert gateway.fleet.replicas[0].is_up
            assert gateway.fleet.replicas[0].num_in_flight == 0
        finally:
            await gateway.stop()
            await runner.cleanup()

    asyncio.run(play())


def test_a_body_that_takes_long_to_parse_is_refused() -> None:
    """Four megabytes of empty lists took seconds, in which the gateway answered nobody."""

    async def play() -> None:
        fragile = Fragile()
        runner, url = await started(fragile.app)
        gateway = Gateway([url], "round_robin")
        await gateway.start()
        content = b'{"model": "fragile", "x": [%b[]]}' % (b"[]," * 40_000)
        try:
            status, body = await ask(gateway, content=content)
            assert (status, code_of(body), fragile.num_asked) == (413, "body_too_large", 0)
        finally:
            await gateway.stop()
            await runner.cleanup()

    asyncio.run(play())


class Odd(Fragile):
    """A server that answers every request for a completion with the same bytes."""

    def __init__(self, status: int, content_type: str, body: bytes) -> None:
        super().__init__()
        self._answer = (
            b"HTTP/1.1 %d Odd\r\nlocation: /\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s"
            % (status, content_type.encode(), len(body), body)
        )

    async def _break(self, request: web.Request) -> web.Response:
        await request.read()
        self.num_asked += 1
        assert request.transport is not None
        request.transport.write(self._answer)
        request.transport.close()
        return web.Response()


async def ask_two(*odd: Fragile) -> tuple[int, bytes, list[int], Gateway]:
    """Ask a gateway in front of two servers; return the answer and how often each was asked."""
    async with in_front_of(*odd) as gateway, asyncio.timeout(30):
        status, body = await ask(gateway)
        return status, body, [each.num_asked for each in odd], gateway


@pytest.mark.parametrize("status", [101, 301, 304, 307, 600, 999])
def test_a_status_that_is_none_of_an_answer_is_a_replica_that_broke_off(status: int) -> None:
    """It is not passed on, and no redirection is followed."""
    odd = [Odd(status, "application/json", b"") for _ in range(2)]
    answered, body, num_asked, gateway = asyncio.run(ask_two(*odd))
    assert (answered, code_of(body), num_asked) == (502, "replica_failed", [1, 1])
    assert f"it answered with the status {status}" in json.loads(body)["error"]["message"]
    assert gateway.metrics.ended[End.FAILED] == 1


class Endless(Fragile):
    """A server that sends its answer again and again until its client goes away."""

    def __init__(self, content_type: str, num_declared: int | None = None) -> None:
        super().__init__()
        self._headers = {"content-type": content_type}
        if num_declared is not None:
            self._headers["content-length"] = str(num_declared)

    async def _break(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.num_asked += 1
        answer = web.StreamResponse(headers=self._headers)
        await answer.prepare(request)
        while True:
            await answer.write(b"data: " * 1000)


@pytest.mark.parametrize("num_declared", [None, 10**9])
def test_a_server_whose_answer_is_too_long_is_a_broken_one(
    num_declared: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slosched.gateway.forward.MOST_ANSWER_BYTES", 100_000)
    endless = [Endless("application/json", num_declared) for _ in range(2)]
    status, body, num_asked, gateway = asyncio.run(ask_two(*endless))
    assert (status, code_of(body), num_asked) == (502, "replica_failed", [1, 1])
    assert "it sends more than 100000 bytes" in json.loads(body)["error"]["message"]
    assert sum(gateway.metrics.failed.values()) == 2


def test_a_stream_whose_event_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slosched.gateway.forward.MOST_ANSWER_BYTES", 100_000)
    endless = [Endless("text/event-stream") for _ in range(2)]
    status, body, num_asked, _ = asyncio.run(ask_two(*endless))
    error, done, rest = body.decode().split("\n\n")
    assert (status, done, rest, sum(num_asked)) == (200, "data: [DONE]", "", 1)
    assert "it sends more than 100000 bytes" in error


def test_an_error_that_comes_as_an_event_is_an_error() -> None:
    event = b'data: {"error": {"code": "not_serving"}}\n\n'
    odd = [Odd(503, "text/event-stream", event) for _ in range(2)]
    status, body, num_asked, gateway = asyncio.run(ask_two(*odd))
    assert (status, body, num_asked) == (503, event, [1, 1])
    assert gateway.metrics.ended == {End.FAILED: 1}


def test_a_503_that_nobody_can_parse_is_passed_on() -> None:
    deep = b"[" * 100_000
    odd = [Odd(503, "application/json", deep) for _ in range(2)]
    status, body, num_asked, _ = asyncio.run(ask_two(*odd))
    assert (status, body, num_asked) == (503, deep, [1, 1])


def test_a_model_whose_only_replica_is_down_will_be_there_again() -> None:
    """Clients give up at a 404, and come again after a 503."""

    async def play() -> list[tuple[int, bytes]]:
        with_it, without_it = Fragile(), Fragile()
        runners = [await started(each.app) for each in (with_it, without_it)]
        gateway = Gateway([url for _, url in runners], "round_robin")
        await gateway.start()
        await gateway.fleet.stop()  # else the first would soon be found to be up
        first, second = gateway.fleet.replicas
        second.models = {"another": {"id": "another"}}
        first.mark_down("it takes a rest")
        odd = json.dumps({"model": "unheard-of", "prompt": "a"}).encode()
        try:
            return [await ask(gateway), await ask(gateway, content=odd)]
        finally:
            await gateway.stop()
            for runner, _ in runners:
                await runner.cleanup()

    (status, body), (odd_status, odd_body) = asyncio.run(play())
    assert (status, code_of(body)) == (503, "no_replica")
    assert "it takes a rest" in json.loads(body)["error"]["message"]
    assert (odd_status, code_of(odd_body)) == (404, "model_not_found")


def test_an_adapter_that_is_loaded_while_the_replica_serves_is_found_within_seconds() -> None:
    """It was unknown until the replica had been down."""

    class Growing(Odd):
        models = ("base",)

        async def _models(self, _request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": name} for name in self.models]})

    async def play() -> list[int]:
        server = Growing(200, "application/json", b"{}")
        runner, url = await started(server.app)
        gateway = Gateway([url], "round_robin")
        await gateway.start()
        body = json.dumps({"model": "sql", "prompt": "a"}).encode()
        try:
            statuses = [(await ask(gateway, content=body))[0]]
            server.models = ("base", "sql")
            async with asyncio.timeout(10):
                while "sql" not in gateway.fleet.models:
                    await asyncio.sleep(0.05)
            return [*statuses, (await ask(gateway, content=body))[0]]
        finally:
            await gateway.stop()
            await runner.cleanup()

    assert asyncio.run(play()) == [404, 200]


@pytest.mark.cost
def test_a_long_event_does_not_keep_the_router_from_all_else() -> None:
    """All that had come of it was searched again with each piece, which took seconds."""
    event = b"data: " + b"x" * 2**25 + b"\n\n"
    odd = [Odd(200, "text/event-stream", event) for _ in range(2)]
    began_s = time.process_time()
    status, body, _, _ = asyncio.run(ask_two(*odd))
    assert (status, body == event) == (200, True)
    assert time.process_time() - began_s < 1.0


class InPieces:
    """A stream that comes in given pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def iter_any(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_an_event_is_passed_on_as_soon_as_its_last_byte_has_come(end: bytes) -> None:
    event = b"data: 1" + end
    events = event + event
    for split in range(1, len(events)):
        sent: list[bytes] = []

        async def send(message: MutableMapping[str, Any], sent: list[bytes] = sent) -> None:
            sent.append(message["body"])

        pieces: Any = InPieces(events[:split], events[split:], b"data: [DO")
        asyncio.run(pass_on(pieces, send))
        first = event if split >= len(event) else b""
        assert sent == [each for each in (first, events[len(first) :]) if each] + [b"data: [DO"]
