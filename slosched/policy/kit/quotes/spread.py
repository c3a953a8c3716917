"""Quantiles of what came over what was expected, learnt online from one's own errors."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Mapping

LEVELS = (0.1, 0.5, 0.9, 0.99)
"""The quantiles that are known: 0.9 is the value that nine of ten do not exceed."""

_WINDOW = 256
"""Number of latest ratios from which quantiles are read."""
_GAIN = 0.01
"""Change of the place at which a level is read after one miss.  A larger one swings: in a queue of
hundreds the first token comes long after its quote."""
_FIRST_RATIOS = (0.6, 0.8, 0.9, 1.0, 1.1, 1.5, 2.5)
"""Ratios that stand for those to come before any was observed."""

_ENOUGH = 32
"""Ratios from which on those of one TTFT are told apart from the others."""
_CLASSES = (-10, 20)
"""The shortest and the longest TTFT, as powers of two, that are told apart."""

Factors = Mapping[float, float]
"""For each level, what an expected value is multiplied by to become that quantile."""


class Spread:
    """The ratios of actual to expected values, lately, and their quantiles.  O(window) a ratio.

    A quantile is read from a window of ratios.  The ratios to come need not be distributed as
    those before them.  So the place in the window at which a level is read moves: up after an
    actual value above the quantile that was quoted for it, and down after any other, so that in
    the long run a share `level` stays below, whatever the distribution is and however it changes.
    This is adaptive conformal inference (Gibbs and Candès, NeurIPS 2021).
    """

    def __init__(self) -> None:
        self._latest = deque(_FIRST_RATIOS, maxlen=_WINDOW)
        self._sorted = sorted(_FIRST_RATIOS)
        self._place = {level: level for level in LEVELS}
        """The place at which each level is read, as a share of the window."""
        self.factors: Factors = self._read()
        """The factors for a value that is expected now; they are replaced, never changed."""
        self.num_observed = 0

    def observe(self, ratio: float, quoted: Factors) -> None:
        """Learn the ratio of an actual value to the expected one, for which `quoted` was given."""
        self.num_observed += 1
        if len(self._latest) == _WINDOW:
            del self._sorted[bisect_left(self._sorted, self._latest[0])]
        self._latest.append(ratio)
        insort(self._sorted, ratio)
        for level, place in self._place.items():
            is_above = ratio > quoted[level]
            moved = place + _GAIN * (level if is_above else level - 1)
            self._place[level] = min(1.0, max(0.0, moved))
        self.factors = self._read()

    @property
    def median(self) -> float:
        """Return the middle one of the latest ratios."""
        return self._sorted[len(self._sorted) // 2]

    def share_up_to(self, ratio: float) -> float:
        """Return the share of the latest ratios that are not above `ratio`."""
        return bisect_right(self._sorted, ratio) / len(self._sorted)

    def _read(self) -> Factors:
        last = len(self._sorted) - 1
        return {
            level: self._sorted[min(last, max(0, math.ceil(place * (last + 2)) - 1))]
            for level, place in self._place.items()
        }


class SpreadByTTFT:
    """Spreads of ratios, one for each TTFT that is promised, as far as they are known.

    Where promises differ, requests with more time wait for those with less, also for those that
    come later.  TTFTs that are next to the same power of two count as the same.
    """

    def __init__(self) -> None:
        self._all = Spread()
        self._by_class: defaultdict[int, Spread] = defaultdict(Spread)

    def at(self, ttft_s: float) -> Spread:
        """Return the spread of requests with this TTFT; that of all before enough were seen."""
        own = self._by_class.get(_class_of(ttft_s))
        return self._all if own is None or own.num_observed < _ENOUGH else own

    def observe(self, ratio: float, quoted: Factors, ttft_s: float) -> None:
        """Learn a ratio, for which `quoted` was given, of a request with this TTFT."""
        for spread in (self._all, self._by_class[_class_of(ttft_s)]):
            spread.observe(ratio, quoted)


def _class_of(ttft_s: float) -> int:
    """Return the power of two that is next to a TTFT; the shortest and longest are one class."""
    least, most = _CLASSES
    return round(min(most, max(least, math.log2(ttft_s)))) if ttft_s > 0 else least
