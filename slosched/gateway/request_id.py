"""An id for each request, which the replica that answers it sees, too."""

from __future__ import annotations

import uuid

from starlette.types import ASGIApp, Receive, Scope, Send

_HEADER = b"x-request-id"


class GiveRequestId:
    """Middleware that gives a request without the header `x-request-id` a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        if scope["type"] == "http" and not any(name == _HEADER for name, _ in headers):
            scope = {**scope, "headers": [*headers, (_HEADER, uuid.uuid4().hex.encode())]}
        await self._app(scope, receive, send)
