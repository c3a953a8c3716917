"""An id for each request, which the replica that answers it sees, too."""

from __future__ import annotations

import uuid

from starlette.types import ASGIApp, Receive, Scope, Send

_HEADER = b"x-request-id"


class GiveRequestId:
    """Middleware that gives a request a new id if its header `x-request-id` is absent or empty.

    The replica would otherwise choose one of its own, which the client is not told.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [pair for pair in scope.get("headers", ()) if pair != (_HEADER, b"")]
        if scope["type"] == "http" and not any(name == _HEADER for name, _ in headers):
            scope = {**scope, "headers": [*headers, (_HEADER, uuid.uuid4().hex.encode())]}
        await self._app(scope, receive, send)
