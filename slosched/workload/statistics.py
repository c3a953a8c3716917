"""What a trace is like: burstiness, lengths, shared prefixes, conversations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

PERCENTILES = (50, 90, 99)


def interarrival_cv(arrivals_s: FloatArray) -> float:
    """Standard deviation of the gaps over their mean; NaN below two gaps or in no time at all."""
    gaps = np.diff(arrivals_s)
    if gaps.size < 2 or gaps.sum() == 0:
        return math.nan
    gaps = np.ldexp(gaps, -int(np.frexp(gaps.max())[1]))  # exact, and no square is too large
    return float(gaps.std() / gaps.mean())


def dispersion_of_counts(arrivals_s: FloatArray, window_s: float) -> float:
    """Variance over mean of the arrivals in whole windows; NaN below two whole windows."""
    windows = arrivals_s // window_s
    if windows[-1] < 2:
        return math.nan
    num_windows = int(windows[-1])
    # By the windows that are not empty: of those that are there may be more than memory holds.
    counts = np.unique(windows[windows < windows[-1]], return_counts=True)[1]
    num_arrivals, num_squared = int(counts.sum()), int((counts**2).sum())
    return (num_windows * num_squared - num_arrivals**2) / (num_windows * num_arrivals)


def describe_lengths(name: str, tokens: IntArray) -> dict[str, float]:
    """Mean and percentiles, as `name`_mean, `name`_p50, …"""
    row = {f"{name}_mean": float(tokens.mean())}
    for percent in PERCENTILES:
        row[f"{name}_p{percent}"] = float(np.percentile(tokens, percent))
    return row


def prefix_hit_rate(prefix_hashes: Iterable[Sequence[int]]) -> float:
    """Share of prompt blocks that a cache without limits has seen before; NaN if none are hashed.

    Requests in order of arrival.  A block is a hit if an earlier request began with the same
    blocks up to and including it, so hits are always a leading run.
    """
    seen: set[int] = set()
    num_blocks = 0
    for hashes in prefix_hashes:
        prefix = 0
        for block in hashes:
            prefix = hash((prefix, block))  # of all blocks so far: integers hash the same always
            seen.add(prefix)
        num_blocks += len(hashes)
    return (num_blocks - len(seen)) / num_blocks if num_blocks else math.nan


def describe_sessions(session_ids: Iterable[str | None]) -> dict[str, float]:
    """Number of conversations and their mean turns; nothing if no request belongs to one."""
    turns = Counter(session for session in session_ids if session is not None)
    if not turns:
        return {}
    return {"sessions": len(turns), "turns_mean": turns.total() / len(turns)}
