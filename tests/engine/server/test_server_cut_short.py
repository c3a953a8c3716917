"""A handler that the server cancels still sends a last answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from live_server import parse_events
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slosched.engine.server.cut_short import CutShort


async def hangs() -> None:
    await asyncio.Event().wait()


async def says_nothing(_scope: Scope, _receive: Receive, _send: Send) -> None:
    await hangs()


def streams(media_type: str) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            yield b"data: 1\n\n"
            await hangs()

        await StreamingResponse(pieces(), media_type=media_type)(scope, receive, send)

    return app


def cancelled(app: ASGIApp) -> list[Message]:
    """Return what the client gets from an app that is cancelled after its first messages."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        await hangs()
        raise AssertionError

    async def run() -> None:
        scope = {"type": "http", "asgi": {"spec_version": "2.3"}}
        task = asyncio.create_task(CutShort(app, retry_after_s=1.5)(scope, receive, send))
        for _ in range(20):
            await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(run())
    return sent


def test_what_has_not_begun_is_a_503() -> None:
    start, body = cancelled(says_nothing)
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"] == b"2"
    assert json.loads(body["body"])["error"]["code"] == "shutdown"


def test_a_stream_of_tokens_ends_with_the_error() -> None:
    start, *parts = cancelled(streams("text/event-stream"))
    assert start["status"] == 200
    text = b"".join(part["body"] for part in parts).decode()
    first, last = parse_events(text)
    assert (first, last["error"]["code"]) == (1, "shutdown")
    assert [part["more_body"] for part in parts] == [True, False]


def test_anything_else_breaks_off() -> None:
    _, *parts = cancelled(streams("application/jsonl"))
    assert [part["more_body"] for part in parts] == [True], "nobody takes it for complete"
