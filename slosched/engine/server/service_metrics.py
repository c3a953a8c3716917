"""Counters by service tier, or by tenant, for GET /metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from slosched.core import DeadlineRule, Request
from slosched.engine.server.prometheus import labels_of, samples
from slosched.metrics import RequestRecord, is_good


class ServiceMetrics:
    """Requests of each tier (tenant) that have ended, the good ones, and those without their SLO.

    Only names that were added are counted: those of tenants may be the client's choice, and each
    name is a series for ever.
    """

    def __init__(self, kind: str) -> None:
        """Begin without names; `kind` is what they are names of: `tier` or `tenant`."""
        self._kind = kind
        self._num_ended: dict[str, int] = {}
        self._num_good: dict[str, int] = {}
        self._num_relegated: dict[str, int] = {}

    def add(self, names: Iterable[str]) -> None:
        """Count the requests of these names, which are shown before the first request, too."""
        for name in names:
            for counts in (self._num_ended, self._num_good, self._num_relegated):
                counts.setdefault(name, 0)

    def observe_end(
        self, name: str | None, record: RequestRecord, request: Request, rule: DeadlineRule
    ) -> None:
        """Count a request that has ended."""
        if name is None or name not in self._num_ended:
            return
        self._num_ended[name] += 1
        self._num_relegated[name] += request.is_relegated
        self._num_good[name] += is_good(record, rule)

    def lines(self, label: str) -> Iterator[str]:
        """Yield the lines of the counters; none if there are no names."""
        for counted, text, counts in (
            ("requests_ended", f"Requests of the {self._kind} that have ended.", self._num_ended),
            ("good_requests", "Those that finished within their SLO.", self._num_good),
            (
                "requests_relegated",
                "Those that had to do without their SLO.",
                self._num_relegated,
            ),
        ):
            by_name = {
                f"{label},{labels_of(**{self._kind: name})}": number
                for name, number in counts.copy().items()
            }
            if by_name:
                metric = f"slosched:{self._kind}_{counted}_total"
                yield from samples(metric, "counter", text, by_name)
