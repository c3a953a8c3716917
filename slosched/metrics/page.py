"""A server's page of metrics in Prometheus' text format, read into values."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STARTED = "process_start_time_seconds"


@dataclass(frozen=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Snapshot:
    """All metrics of a server at one time; times count in seconds since 1970."""

    time_s: float
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)

    @property
    def started_s(self) -> float | None:
        """Return when the server started, None if it does not say."""
        return self.total(_STARTED)

    def total(self, name: str) -> float | None:
        """Return the sum of a metric over all its labels, None if the server does not have it."""
        samples = self.samples.get(name)
        return None if samples is None else sum(sample.value for sample in samples)

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over all its labels, such as the engines of one server."""
        total = self.total(name)
        return None if total is None else total / len(self.samples[name])

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Return the sums of a metric for each value of one label."""
        sums: defaultdict[str, float] = defaultdict(float)
        for sample in self.samples.get(name, ()):
            sums[sample.labels.get(label, "")] += sample.value
        return dict(sums)


def parse_metrics(text: str, time_s: float) -> Snapshot:
    """Return the samples of a page in Prometheus' text format."""
    samples: defaultdict[str, list[Sample]] = defaultdict(list)
    for name, labels, value in _SAMPLE.findall(text):
        samples[name].append(Sample(dict(_LABEL.findall(labels)), float(value)))
    return Snapshot(time_s, {name: tuple(found) for name, found in samples.items()})
