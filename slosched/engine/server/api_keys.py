"""API keys: who may use a server, apart from asking whether it is well."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from slosched.engine.server.config import ServerConfig
from slosched.engine.server.errors import wrong_key
from slosched.workload.http_slo import TENANT_HEADERS

_OPEN_PATHS = frozenset({"/", "/health", "/ping", "/version", "/metrics", "/load"})
"""Paths for load balancers and monitoring, which have no keys, and the page that asks for one."""


class RequireKey:
    """Middleware that answers 401 unless a request has one of the keys, as `Bearer <key>`."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        else:
            await wrong_key().response()(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        return has_key(Headers(scope=scope), self._keys)


def has_key(headers: Mapping[str, str], keys: Collection[str]) -> bool:
    """Tell whether a request has one of `keys`, as `Bearer <key>`."""
    given = _key(headers)
    # All keys are compared, so that the time tells nothing about them.
    matches = [secrets.compare_digest(given, key.encode()) for key in keys]
    return any(matches)


def tenant_of(headers: Mapping[str, str], config: ServerConfig) -> str | None:
    """Return the tenant that a request comes from; None if that is not known.

    Its key says so.  Where requests need no key, a header of llm-d does.
    """
    if config.tenants:
        given = _key(headers)
        return next(
            (
                name
                for key, name in config.tenants.items()
                if secrets.compare_digest(given, key.encode())
            ),
            None,
        )
    if config.api_keys:
        return None
    return next((headers[name] for name in TENANT_HEADERS if name in headers), None)


def _key(headers: Mapping[str, str]) -> bytes:
    """Return the key of `Bearer <key>` as it was sent; it is empty if there is none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1") if scheme.lower() == "bearer" else b""
