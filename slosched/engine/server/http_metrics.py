"""Counts of HTTP requests, under the names of vLLM's server (prometheus-fastapi-instrumentator)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slosched.engine.server.prometheus import Histogram, head, labels_of, samples

_DURATION = ("http_request_duration_seconds", "Time until the end of an answer.")
_DURATION_BOUNDS_S = (0.1, 0.5, 1)
"""The bounds of prometheus-fastapi-instrumentator, and more would be a series for each path."""
_METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH"})


class _Kind(NamedTuple):
    handler: str
    method: str
    status: str


class HTTPMetrics:
    """The HTTP requests of one server since it started."""

    def __init__(self) -> None:
        self._counts: Counter[_Kind] = Counter()
        self._durations: dict[tuple[str, str], Histogram] = {}
        """A histogram for each path and method."""

    def observe(self, scope: Scope, status: int) -> None:
        """Count an answer; paths without an endpoint and odd methods count as "none"."""
        self._counts[_Kind(*_place_of(scope), f"{status // 100}xx")] += 1

    def observe_duration(self, scope: Scope, seconds: float) -> None:
        """Count how long an answer took until its end."""
        place = _place_of(scope)
        if (histogram := self._durations.get(place)) is None:
            histogram = self._durations[place] = Histogram(*_DURATION, _DURATION_BOUNDS_S)
        histogram.observe(seconds)

    def lines(self) -> Iterator[str]:
        values = {labels_of(**kind._asdict()): float(n) for kind, n in self._counts.items()}
        text = "Answers to HTTP requests, by path, method and status."
        yield from samples("http_requests_total", "counter", text, values)
        if self._durations:
            yield from head(_DURATION[0], "histogram", _DURATION[1])
        for (handler, method), histogram in self._durations.items():
            yield from histogram.samples(labels_of(handler=handler, method=method))


def _place_of(scope: Scope) -> tuple[str, str]:
    """Return the path, with names in place of its parameters, and the method.

    A path has at most one parameter, which is its end.
    """
    handler = scope["path"] if "endpoint" in scope else "none"
    for name, value in scope.get("path_params", {}).items():
        handler = f"{handler.removesuffix(str(value))}{{{name}}}"
    return handler, scope["method"] if scope["method"] in _METHODS else "none"


class CountRequests:
    """Middleware that counts each request when its answer begins, and its time at the end."""

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.observe(scope, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, counting)
        finally:
            self._metrics.observe_duration(scope, time.perf_counter() - began_s)
