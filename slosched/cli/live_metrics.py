"""What a running server says about itself on /metrics, and how it changed between two looks."""

from __future__ import annotations

import http.client
import math
import time
import urllib.request
from dataclasses import dataclass

from slosched.core import SloschedError
from slosched.metrics.page import Snapshot, parse_metrics

_TIMEOUT_S = 5.0


class NoMetricsError(SloschedError):
    """There is no server that shows metrics at the given address."""


def read_metrics(url: str) -> Snapshot:
    """Return the metrics of the server at `url` as they are now."""
    page = f"{url}/metrics"
    try:
        with urllib.request.urlopen(page, timeout=_TIMEOUT_S) as response:
            text = response.read()
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)  # urllib wraps what went wrong
        why = getattr(why, "strerror", None) or why
        raise NoMetricsError(
            f"{page}: {why}; is a server running there? Start one with `slosched serve`"
        ) from error
    try:
        snapshot = parse_metrics(text.decode(), time.time())
    except ValueError:  # another program's page, perhaps of HTML
        snapshot = Snapshot(time.time())
    if any(name.startswith("slosched:route_") for name in snapshot.samples):
        raise NoMetricsError(
            f"{page} is of a router, which runs no requests itself; name one of its servers"
        )
    if "vllm:num_requests_running" not in snapshot.samples:
        raise NoMetricsError(f"{page} has no metrics of slosched or vLLM")
    return snapshot


@dataclass(frozen=True)
class Span:
    """What happened between two snapshots of one server."""

    before: Snapshot
    now: Snapshot

    @property
    def duration_s(self) -> float:
        return self.now.time_s - self.before.time_s

    def growth(self, name: str) -> float | None:
        """Return by how much a counter grew, None if the server does not have it."""
        now = self.now.total(name)
        return None if now is None else now - (self.before.total(name) or 0.0)

    def growth_by_label(self, name: str, label: str) -> dict[str, float]:
        """Return by how much a counter grew for each value of one label."""
        before = self.before.by_label(name, label)
        now = self.now.by_label(name, label)
        return {key: value - before.get(key, 0.0) for key, value in now.items()}

    def quantile(self, name: str, share: float) -> float | None:
        """Return a quantile of what a histogram counted, None if it counted nothing.

        Values count as spread evenly over their bucket, as in Prometheus' `histogram_quantile`.
        The quantile is infinite if it lies beyond the last bound.
        """
        grown = self.growth_by_label(f"{name}_bucket", "le")
        counts = sorted((float(bound), count) for bound, count in grown.items())
        if not counts or counts[-1][1] == 0:
            return None
        rank = share * counts[-1][1]
        low, num_below = 0.0, 0.0
        for bound, count in counts:
            if count >= rank and count > num_below:
                if math.isinf(bound):
                    break
                return low + (bound - low) * (rank - num_below) / (count - num_below)
            low, num_below = bound, count
        return math.inf
