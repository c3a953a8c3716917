"""A last answer to clients whose response is not complete when a shutdown runs out of time."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slosched.core import EndReason
from slosched.engine.server.errors import of_end
from slosched.engine.server.respond import last_events


class CutShort:
    """Middleware that answers when the server cancels a handler at the end of a shutdown.

    A response that has not begun becomes a 503.  A stream of tokens ends with the error as its last
    event.  Any other response that has begun just breaks off.
    """

    def __init__(self, app: ASGIApp, retry_after_s: float) -> None:
        self._app = app
        self._error = of_end(EndReason.SHUTDOWN, "", retry_after_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: list[Message] = []

        async def noting_begin(message: Message) -> None:
            if not begun:
                begun.append(message)
            await send(message)

        try:
            await self._app(scope, receive, noting_begin)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not begun:
                await self._error.response()(scope, receive, send)
                return
            kind = dict(begun[0]["headers"]).get(b"content-type", b"")
            if kind.startswith(b"text/event-stream"):
                body = last_events(self._error)
                await send({"type": "http.response.body", "body": body, "more_body": False})
