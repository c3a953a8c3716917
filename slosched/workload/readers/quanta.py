"""Timestamps that were rounded: how coarsely, and spread again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slosched.workload.request import TraceRequest
from slosched.workload.statistics import FloatArray

_QUANTISED_SHARE = 0.5


def exact(times_s: FloatArray) -> float | None:  # noqa: ARG001  # one signature for all
    """For formats whose timestamps are as fine as they look."""
    return None


def of_shared_times(times_s: FloatArray) -> float | None:
    """The usual gap between different times, if most requests share theirs with another.

    Mooncake's are rounded so (to 3 s).  None if at most half are shared.
    """
    times, counts = np.unique(times_s, return_counts=True)
    if len(times) < 2 or counts[counts > 1].sum() <= _QUANTISED_SHARE * len(times_s):
        return None
    return float(np.median(np.diff(times)))


def of_whole_seconds(times_s: FloatArray) -> float | None:
    """1 s if no time has a fraction, as in BurstGPT, where few requests share a second."""
    return 1.0 if (times_s == np.floor(times_s)).all() else None


def spread(requests: Sequence[TraceRequest], quantum_s: float, seed: int) -> list[TraceRequest]:
    """Requests of equal time spread over the quantum after it, or until the next time.

    Uniformly at random, in the order given: given how many arrived in a quantum, that is what a
    Poisson process does, whereas equal spacing would look smoother than any real arrivals.
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
