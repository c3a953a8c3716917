"""What the deployment that clients reach refuses by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed here: pip install 'slosched[ray]'")

from starlette.requests import Request as HTTPRequest

from slosched.gateway.ray_serve.call import Head
from slosched.gateway.ray_serve.front import Front


class Nobody:
    """The handle of a deployment that is not to be asked."""

    def options(self, **_options: Any) -> Nobody:
        return self


@pytest.mark.filterwarnings("ignore")  # warnings from Ray itself
def test_a_body_that_takes_long_to_parse_is_refused() -> None:
    """The routers would parse it, and each handle has one, which answers nobody meanwhile."""
    content = b'{"x": [%b[]]}' % (b"[]," * 40_000)

    async def receive() -> Any:
        return {"type": "http.request", "body": content, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    response = asyncio.run(Front(Nobody())(HTTPRequest(scope, receive)))
    assert response.status_code == 413
    assert b"body_too_large" in response.body


class Replicas:
    """The handle of a deployment whose one replica answers for ever, as far as anybody reads."""

    def __init__(self) -> None:
        self.answer = self
        self.has_begun = self.is_cancelled = False

    def options(self, **_options: Any) -> Replicas:
        return self

    def remote(self, _call: Any) -> Replicas:
        return self

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
