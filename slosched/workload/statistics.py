"""Statistics of a trace: burstiness, lengths, shared prefixes, conversations."""

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
    """Return the standard deviation of the gaps over their mean.

    NaN if there are fewer than two gaps, or if all arrivals are at the same time.
    """
    gaps = np.diff(arrivals_s)
    if gaps.size < 2 or gaps.sum() == 0:
        return math.nan
    gaps = np.ldexp(gaps, -int(np.frexp(gaps.max())[1]))  # exact, and no square is too large
    return float(gaps.std() / gaps.mean())


def dispersion_of_counts(arrivals_s: FloatArray, window_s: float) -> float:
    """Return variance over mean of the arrivals in whole windows; NaN below two whole windows."""
    windows = arrivals_s // window_s
    if windows[-1] < 2:
        return math.nan
    num_windows = int(windows[-1])
    # Only windows that are not empty are counted: memory may not hold all the empty ones.
    counts = np.unique(windows[windows < windows[-1]], return_counts=True)[1]
    num_arrivals, num_squared = int(counts.sum()), int((counts**2).sum())
    return (num_windows * num_squared - num_arrivals**2) / (num_windows * num_arrivals)


def describe_lengths(name: str, tokens: IntArray) -> dict[str, float]:
    """Return the mean and the percentiles, as `name`_mean, `name`_p50, …"""
    row = {f"{name}_mean": float(tokens.mean())}
    for percent in PERCENTILES:
        row[f"{name}_p{percent}"] = float(np.percentile(tokens, percent))
    return row


def prefix_hit_rate(prefix_hashes: Iterable[Sequence[int]]) -> float:
    """Return the share of prompt blocks that a cache without limits has seen before.

    The requests must be in order of arrival.  A block is a hit if an earlier request began with the
    same blocks up to and including it, so the hits of a request are its first blocks.  NaN if no
    request has hashes.
    """
    seen: set[int] = set()
    num_blocks = 0
    for hashes in prefix_hashes:
        prefix = 0
        for block in hashes:
            prefix = hash((prefix, block))  # of all blocks so far; hashes of integers never vary
            seen.add(prefix)
        num_blocks += len(hashes)
    return (num_blocks - len(seen)) / num_blocks if num_blocks else math.nan


def describe_sessions(session_ids: Iterable[str | None]) -> dict[str, float]:
    """Return the number of conversations and their mean turns; empty if there are none."""
    turns = Counter(session for session in session_ids if session is not None)
    if not turns:
        return {}
    return {"sessions": len(turns), "turns_mean": turns.total() / len(turns)}
