"""API keys: who may use a server, apart from asking whether it is well."""

from __future__ import annotations

import secrets
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slosched.engine.server.errors import wrong_key

_OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics"})
"""Paths for load balancers and monitoring, which have no keys, and the page that asks for one."""


class RequireKey:
    """Middleware that answers 401 unless a request has one of the keys, as `Bearer <key>`."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            await wrong_key().response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode()
        # All keys are compared, so that the time tells nothing about them.
        matches = [secrets.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)
