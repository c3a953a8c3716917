"""Cross-origin requests (CORS): web pages of other origins that use a server."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from slosched.workload.http_slo import BEST_EFFORT_HEADER

_EXPOSED_HEADERS = ("retry-after", "x-request-id", BEST_EFFORT_HEADER)
"""Headers of answers that pages may read."""


def cross_origin(allowed_origins: Sequence[str]) -> list[Middleware]:
    """Return the middleware by which browsers let pages of these origins use the server."""
    if not allowed_origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )
    ]
