"""Counters by service tier for GET /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slosched.core import DeadlineRule, Request
from slosched.engine.server.prometheus import labels_of, samples
from slosched.metrics import RequestRecord, is_good


class TierMetrics:
    """Requests of each tier that have ended, those that were good, and those without their SLO."""

    def __init__(self) -> None:
        self._num_ended: dict[str, int] = {}
        self._num_good: dict[str, int] = {}
        self._num_relegated: dict[str, int] = {}

    def add(self, names: Iterable[str]) -> None:
        """Show these tiers, also before their first request."""
        for name in names:
            for counts in (self._num_ended, self._num_good, self._num_relegated):
                counts.setdefault(name, 0)

    def observe_end(self, record: RequestRecord, request: Request, rule: DeadlineRule) -> None:
        """Count a request that has ended; one that was relegated is never good."""
        if request.tier is None:
            return
        self.add((request.tier,))
        self._num_ended[request.tier] += 1
        self._num_relegated[request.tier] += request.is_relegated
        self._num_good[request.tier] += not request.is_relegated and is_good(record, rule)

    def lines(self, label: str) -> Iterator[str]:
        """Yield the lines of the counters; none if there are no tiers."""
        for name, text, counts in (
            ("requests_ended", "Requests of the tier that have ended.", self._num_ended),
            ("good_requests", "Those that finished within their SLO.", self._num_good),
            (
                "requests_relegated",
                "Those that had to do without their SLO.",
                self._num_relegated,
            ),
        ):
            by_tier = {f"{label},{labels_of(tier=tier)}": n for tier, n in counts.copy().items()}
            if by_tier:
                yield from samples(f"slosched:tier_{name}_total", "counter", text, by_tier)
