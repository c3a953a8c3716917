"""Timestamps that were rounded: find how coarsely, and spread them again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slosched.workload.request import TraceRequest
from slosched.workload.statistics import FloatArray

_QUANTISED_SHARE = 0.5


def exact(times_s: FloatArray) -> float | None:  # noqa: ARG001  # one signature for all
    """Return None, for formats whose timestamps are exact."""
    return None


def of_shared_times(times_s: FloatArray) -> float | None:
    """Return the usual gap between different times, if most requests share theirs with another.

    Mooncake's times are rounded in this way (to 3 s).  Returns None if at most half are shared.
    """
    times, counts = np.unique(times_s, return_counts=True)
    if len(times) < 2 or counts[counts > 1].sum() <= _QUANTISED_SHARE * len(times_s):
        return None
    return float(np.median(np.diff(times)))


def of_whole_seconds(times_s: FloatArray) -> float | None:
    """Return 1 s if no time has a fraction, else None.

    BurstGPT's times are such, although few of its requests share a second.
    """
    return 1.0 if (times_s == np.floor(times_s)).all() else None


def spread(requests: Sequence[TraceRequest], quantum_s: float, seed: int) -> list[TraceRequest]:
    """Spread requests of equal time over the quantum after it, or until the next time.

    They are spread uniformly at random and keep their order. That is what a Poisson process does,
    given how many requests arrived in a quantum; equal spacing would be smoother than any real
    arrivals.
    """
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    times, counts = np.unique([r.arrival_s for r in ordered], return_counts=True)
    widths = np.minimum(np.append(np.diff(times), quantum_s), quantum_s)
    rng = np.random.default_rng(seed)
    arrivals = np.concatenate(
        [
            start + width * np.sort(rng.random(count))
            for start, width, count in zip(times, widths, counts, strict=True)
        ]
    )
    return [replace(r, arrival_s=float(t)) for r, t in zip(ordered, arrivals, strict=True)]
