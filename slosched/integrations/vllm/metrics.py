"""Counts of what happened to the plans, on vLLM's own /metrics page.

The scheduler runs in the engine's process, but the page is the API server's.  Prometheus joins them
if `PROMETHEUS_MULTIPROC_DIR` names a folder. vLLM sets it itself with several API servers, and the
operator sets it otherwise.  Without it, only the log has the counts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from prometheus_client import Counter

from slosched.integrations.vllm.truth import Count


@cache
def _events() -> Counter:
    """Return the one counter of the process, since Prometheus accepts each name once."""
    return Counter(
        "slosched_events",
        "Steps planned and diverged from the plan, how they diverged, fallbacks to vLLM's own "
        "order, and rejections",
        ["engine", "event", "kind"],
    )


def counter(engine: int) -> Count:
    """Return a function that counts events of the engine with this number in vLLM's metrics."""

    # Prometheus takes 5 µs to find a counter by its labels, and several are counted in a step.
    increments: dict[tuple[str, str], Callable[[float], None]] = {}

    def count(event: str, kind: str, num: int = 1) -> None:
        increment = increments.get((event, kind))
        if increment is None:
            increment = increments[event, kind] = _events().labels(engine, event, kind).inc
        increment(num)

    return count
