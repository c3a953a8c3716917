"""A limit on the generations that a server answers at once."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from slosched.engine.server.account import GENERATING_PATHS
from slosched.engine.server.errors import too_many_requests


class LimitRequests:
    """Middleware that answers 503 to a generation while `most` others are being answered.

    All other endpoints, such as /health, are always answered.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._num_running = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in GENERATING_PATHS:
            await self._app(scope, receive, send)
            return
        if self._num_running >= self._most:
            await too_many_requests(self._most).response()(scope, receive, send)
            return
        self._num_running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_running -= 1
