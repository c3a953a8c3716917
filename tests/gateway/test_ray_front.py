"""What the deployment that clients reach refuses by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'slosched[ray]'")

from ray.exceptions import RayActorError
from starlette.requests import Request as HTTPRequest

from slosched.gateway.ray_serve.call import Call, Head
from slosched.gateway.ray_serve.front import Front

Pieces = AsyncIterator[Head | bytes]


class Answers:
    """The handle of a deployment whose replicas answer a call with these pieces."""

    def __init__(self, pieces: Callable[[Call], Pieces]) -> None:
        self.answer = self
        self._pieces = pieces
        self.calls: list[Call] = []

    def options(self, **_options: Any) -> Answers:
        return self

    def remote(self, call: Call) -> Answer:
        self.calls.append(call)
        return Answer(self._pieces(call))


class Answer:
    """One answer, which the front may cancel."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    def __aiter__(self) -> Pieces:
        return self._pieces

    async def __anext__(self) -> Head | bytes:
        return await anext(self._pieces)

    def cancel(self) -> None:
        pass


async def nothing(_call: Call) -> Pieces:
    """Answer no call: the replica has ended."""
    raise RayActorError
    yield b""


def serves(max_model_len: int) -> Callable[[Call], Pieces]:
    """Return what a replica answers whose model holds so many tokens."""

    async def pieces(call: Call) -> Pieces:
        yield Head("http://a", 200, [(b"content-type", b"application/json")])
        if call.target == "/v1/models":
            listed = json.dumps({"data": [{"id": "m", "max_model_len": max_model_len}]}).encode()
            yield listed[:9]
            yield listed[9:]
        else:
            yield b"{}"

    return pieces


def status_of(front: Front, content: bytes) -> int:
    """Return the status with which the front answers a completion with this body."""

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    http = HTTPRequest({**scope, "headers": [], "server": ("a", 80)}, receive)
    return asyncio.run(front(http)).status_code


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_a_body_is_limited_by_the_context_of_the_replicas() -> None:
    ids = b'{"prompt": [%b1]}' % (b"1," * 400_000)
    long, short, down = Answers(serves(2**20)), Answers(serves(4096)), Answers(nothing)
    front = Front(long, "sk-1")
    assert [status_of(front, ids) for _ in range(2)] == [200, 200]
    assert [call.target for call in long.calls] == ["/v1/models", *["/v1/completions"] * 2]
    assert long.calls[0].headers == [("authorization", "Bearer sk-1")]
    assert status_of(Front(short), ids) == 413
    assert status_of(Front(down), ids) == 413
    assert status_of(Front(down), b'{"prompt": [1]}') == 502


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_a_body_that_takes_long_to_parse_is_refused() -> None:
    """The routers would parse it, and each handle has one, which answers nobody meanwhile."""
    content = b'{"x": [%b[]]}' % (b"[]," * 40_000)

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    response = asyncio.run(Front(Answers(nothing))(HTTPRequest(scope, receive)))
    assert response.status_code == 413
    assert b"body_too_large" in response.body


class Replicas:
    """The handle of a deployment whose one replica answers for ever, as far as anybody reads."""

    def __init__(self) -> None:
        self.answer = self
        self.has_begun = self.is_cancelled = False

    def options(self, **_options: Any) -> Replicas:
        return self

    def remote(self, call: Call) -> Any:
        return Answer(nothing(call)) if call.method == "GET" else self

    def __aiter__(self) -> Replicas:
        return self

    async def __anext__(self) -> Head | bytes:
        if self.has_begun:
            return b"data: more\n\n"
        self.has_begun = True
        return Head("http://a", 200, [(b"content-type", b"text/event-stream")])

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_a_client_that_goes_while_it_is_sent_a_piece_ends_the_call() -> None:
    """Ray Serve itself cancels a call only while the next piece is waited for."""
    replicas = Replicas()
    has_gone = asyncio.Event()
    messages = [{"type": "http.request", "body": b'{"prompt": "a"}', "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await has_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            has_gone.set()
            await asyncio.Event().wait()  # the client reads no more

    async def play() -> None:
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        response = await Front(replicas)(HTTPRequest(scope, receive))
        await response(scope, receive, send)
        del response
        await asyncio.sleep(0.1)

    asyncio.run(play())
    assert replicas.is_cancelled
