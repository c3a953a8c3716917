"""The id by which a client, a proxy and a log know the same HTTP request."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"
_MAX_CHARS = 128


class EchoRequestId:
    """Middleware that returns the header `x-request-id` of the request, or a new id without one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def echoing(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = Headers(scope=scope).get(_HEADER, "")[:_MAX_CHARS]
                MutableHeaders(scope=message)[_HEADER] = given or uuid.uuid4().hex
            await send(message)

        await self._app(scope, receive, echoing if scope["type"] == "http" else send)
