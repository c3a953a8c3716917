"""What happened to the plans, on vLLM's own /metrics page.

The scheduler runs in the engine's process, the page is the API server's.  Prometheus joins them
where `PROMETHEUS_MULTIPROC_DIR` names a folder, which vLLM sets itself with several API servers and
an operator sets otherwise; else the log alone tells.
"""

from __future__ import annotations

from functools import cache

from prometheus_client import Counter

from slosched.integrations.vllm.truth import Count


@cache
def _events() -> Counter:
    """One for the whole process, as Prometheus wants it."""
    return Counter(
        "slosched_events",
        "Steps planned and diverged from the plan, how they diverged, fallbacks to vLLM's own "
        "order, and rejections",
        ["engine", "event", "kind"],
    )


def counter(engine: int) -> Count:
    """Of one of a server's engines, under the number that vLLM gives it in its own counts."""

    def count(event: str, kind: str) -> None:
        _events().labels(engine, event, kind).inc()

    return count
