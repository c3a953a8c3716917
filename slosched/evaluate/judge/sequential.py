"""The interval of a ratio of paired shares, at several looks at data that still come in.

Both policies play the same windows, and each window gives a pair of shares of good requests.  The
ratio of their means has Fieller's interval (1954): all ratios r for which a paired t-test does not
reject that share - r x other share is 0 in the mean.  It needs no logarithm, so it also holds where
the other policy serves nothing well.

Looking several times and stopping when the answer is clear would make an ordinary interval wrong
too often.  So each look has a level of its own, and their errors add up to 5 % (Bonferroni, a
group-sequential design): with a probability of 95 % the intervals of all looks hold together,
whenever one stops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy.special import stdtrit

from slosched.evaluate.statistics import Interval

FloatArray = npt.NDArray[np.float64]

LEVEL_WITHIN = 0.02
"""Ratios that are surely within this share of 1 are level."""


@dataclass(frozen=True)
class Look:
    """A look at the data: after how many windows, and the error that its interval may make."""

    num_windows: int
    error: float


LOOKS = (Look(6, 0.010), Look(12, 0.015), Look(24, 0.025))
"""The looks.  Early ones have small errors: they stop only where the answer is very clear."""


class Verdict(StrEnum):
    """How a policy compares with another one."""

    AHEAD = "ahead"
    """The whole interval is above 1."""
    LEVEL = "level"
    """The whole interval is within 2 % of 1."""
    BEHIND = "behind"
    """The whole interval is below 1."""
    NOT_SURE = "not sure"

    @classmethod
    def of(cls, ratio: Interval) -> Verdict:
        """Return the verdict for an interval of the ratio."""
        low, high = ratio
        if low >= 1 - LEVEL_WITHIN and high <= 1 + LEVEL_WITHIN:
            return cls.LEVEL
        if low > 1:
            return cls.AHEAD
        return cls.BEHIND if high < 1 else cls.NOT_SURE


def ratio_of_means(shares: FloatArray, others: FloatArray) -> float:
    """Return the ratio of the means; inf if only the others are all 0, NaN if both are."""
    above, below = float(shares.mean()), float(others.mean())
    if below:
        return above / below
    return math.inf if above else math.nan


def ratio_interval(shares: FloatArray, others: FloatArray, error: float) -> Interval:
    """Return the interval of the ratio of means of paired values that are not negative.

    Arrays have shape (windows,), at least 2.  `error` is the probability that the interval misses
    the ratio if values are normal.  It is [0, inf] where the data say nothing, and [1, 1] where the
    values do not differ in any window.
    """
    if np.array_equal(shares, others):
        return Interval(1.0, 1.0)
    count = len(shares)
    t = float(stdtrit(count - 1, 1 - error / 2))
    spread = t * t / count * np.cov(shares, others)
    var, cov, var_others = float(spread[0, 0]), float(spread[0, 1]), float(spread[1, 1])
    mean, mean_others = float(shares.mean()), float(others.mean())
    # A ratio r is inside if square*r^2 - 2*half*r + rest <= 0.
    square, half = mean_others**2 - var_others, mean * mean_others - cov
    rest = mean**2 - var
    root = math.sqrt(max(0.0, half * half - square * rest))
    if square > 0:
        return Interval(max(0.0, (half - root) / square), max(0.0, (half + root) / square))
    if rest <= 0:
        return Interval(0.0, math.inf)
    return Interval(rest / (half + root) if half + root > 0 else math.inf, math.inf)
