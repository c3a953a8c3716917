"""What a running server says about itself on /metrics, and how it changed between two looks."""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from slosched.core import SloschedError

_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_STARTED = "process_start_time_seconds"


class NoMetricsError(SloschedError):
    """There is no server that shows metrics at the given address."""


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


def read_metrics(url: str) -> Snapshot:
    """Return the metrics of the server at `url` as they are now."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no address of a server; write http://127.0.0.1:8000")
    page = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(page, timeout=_TIMEOUT_S) as response:
            text = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)  # urllib wraps what went wrong
        raise NoMetricsError(
            f"{page}: {why}; is a server running there? Start one with `slosched serve`"
        ) from error
    snapshot = parse_metrics(text, time.time())
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
