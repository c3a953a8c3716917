"""The id by which a client, a proxy and a log know the same HTTP request."""

from __future__ import annotations

import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slosched.engine.log_lines import REQUEST_ID

_HEADER = "x-request-id"
_MAX_CHARS = 128


class EchoRequestId:
    """Middleware that returns the header `x-request-id` of the request, or a new id without one.

    Log lines that are written on behalf of the request have that id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get(_HEADER, "")[:_MAX_CHARS] or uuid.uuid4().hex

        async def echoing(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = request_id
            await send(message)

        token = REQUEST_ID.set(request_id)
        try:
            await self._app(scope, receive, echoing)
        finally:
            REQUEST_ID.reset(token)
