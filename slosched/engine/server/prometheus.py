"""Prometheus' text format: histograms and single samples."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = tuple(base * 10**power for power in range(6) for base in (1, 2, 5))
SIGNED_SECONDS = (*(-bound for bound in reversed(SECONDS)), 0, *SECONDS)
"""Bounds for times that may be negative."""
CONTENT_TYPE = "text/plain; version=0.0.4"


class Histogram:
    """A histogram with fixed buckets, which become cumulative only when written out."""

    def __init__(self, name: str, text: str, bounds: Sequence[float] = SECONDS) -> None:
        self.name = name
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, label: str) -> Iterator[str]:
        yield from head(self.name, "histogram", self.text)
        yield from self.samples(label)

    def samples(self, label: str) -> Iterator[str]:
        """Yield the buckets, the sum and the count, without the lines that describe them."""
        total = 0
        before = f"{label}," if label else ""
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            le = "+Inf" if bound == math.inf else f"{bound:g}"
            yield f'{self.name}_bucket{{{before}le="{le}"}} {total}'
        labels = f"{{{label}}}" if label else ""
        yield f"{self.name}_sum{labels} {self._sum!r}"
        yield f"{self.name}_count{labels} {total}"


class HistogramByTier:
    """A histogram for each service tier; requests without a tier have one without that label."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._of_tier: dict[str | None, Histogram] = {}

    def observe(self, tier: str | None, value: float) -> None:
        if (histogram := self._of_tier.get(tier)) is None:
            histogram = self._of_tier[tier] = Histogram(self._name, self._text, self._bounds)
        histogram.observe(value)

    def lines(self, label: str) -> Iterator[str]:
        """Yield all lines; none before the first value."""
        if self._of_tier:
            yield from head(self._name, "histogram", self._text)
        for tier, histogram in self._of_tier.copy().items():
            yield from histogram.samples(
                label if tier is None else f"{label},{labels_of(tier=tier)}"
            )


def labels_of(**values: str) -> str:
    """Return labels as they are written between braces."""
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in values.items())


def sample(name: str, kind: str, text: str, labels: str, value: float) -> Iterator[str]:
    return samples(name, kind, text, {labels: value})


def samples(name: str, kind: str, text: str, values: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of one metric, with a value for each set of labels."""
    yield from head(name, kind, text)
    for labels, value in values.items():
        yield f"{name}{{{labels}}} {value!r}" if labels else f"{name} {value!r}"


def head(name: str, kind: str, text: str) -> Iterator[str]:
    """Yield the lines that describe a metric."""
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
