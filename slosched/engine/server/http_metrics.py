"""Counts of HTTP requests, under the names of vLLM's server (prometheus-fastapi-instrumentator)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slosched.engine.server.prometheus import labels_of, samples

_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class _Kind(NamedTuple):
    handler: str
    method: str
    status: str


class HTTPMetrics:
    """The HTTP requests of one server since it started."""

    def __init__(self) -> None:
        self._counts: Counter[_Kind] = Counter()

    def observe(self, scope: Scope, status: int) -> None:
        """Count an answer; paths without an endpoint and odd methods count as "none"."""
        handler = scope["path"] if "endpoint" in scope else "none"
        for name, value in scope.get("path_params", {}).items():
            handler = handler.replace(str(value), f"{{{name}}}")
        method = scope["method"] if scope["method"] in _METHODS else "none"
        self._counts[_Kind(handler, method, f"{status // 100}xx")] += 1

    def lines(self) -> Iterator[str]:
        values = {labels_of(**kind._asdict()): float(n) for kind, n in self._counts.items()}
        text = "Answers to HTTP requests, by path, method and status."
        return samples("http_requests_total", "counter", text, values)


class CountRequests:
    """Middleware that counts each request when its answer begins."""

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.observe(scope, message["status"])
            await send(message)

        await self._app(scope, receive, counting if scope["type"] == "http" else send)
