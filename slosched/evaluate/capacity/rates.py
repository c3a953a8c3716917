"""The choice of the next rate to simulate: a bisection whose only state is what was measured.

Rates come from one lattice, 1 request/s times powers of (1 + precision).  So every policy is
measured at the same rates, where differences are paired.  A search that is continued, or made for
another target, can use the points of the last one.  A place on the lattice is its exponent k.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from slosched.evaluate.statistics import antitonic


@dataclass(frozen=True)
class Lattice:
    """The rates that a search may choose from: all places between two, both included."""

    precision: float
    lowest: int
    highest: int

    @classmethod
    def between(cls, low: float, high: float, precision: float) -> Lattice:
        """Return the lattice of all rates that are at least `low` and at most `high`.

        Raise ValueError if there is none, or for a wrong precision.
        """
        if not 0 < precision <= 0.5:
            raise ValueError(f"precision must be a share in (0, 0.5], as 0.02, not {precision!r}")
        if not 0 < low < high < math.inf:
            raise ValueError(
                f"a search needs a lowest rate and a higher highest one, not {low!r} and {high!r}"
            )
        step = math.log1p(precision)
        wide = cls(precision, math.floor(math.log(low) / step), math.ceil(math.log(high) / step))
        lowest, highest = wide.lowest, wide.highest
        # A step or two at either end: whether a rate is inside is up to its rounding.
        while wide.rate(lowest) < low:
            lowest += 1
        while wide.rate(highest) > high:
            highest -= 1
        if lowest > highest:
            raise ValueError(
                f"no rate of a search with precision {precision} is between {low!r} and {high!r} "
                "requests/s: widen the range, or ask for a finer precision"
            )
        return replace(wide, lowest=lowest, highest=highest)

    def rate(self, k: int) -> float:
        """Return requests/s, rounded so that the last bit cannot differ between machines."""
        return float(f"{(1 + self.precision) ** k:.6g}")

    def only(self, rate: float) -> Lattice:
        """Return a lattice that has only the place nearest to `rate`."""
        k = self.nearest(rate)
        return replace(self, lowest=k, highest=k)

    def nearest(self, rate: float) -> int:
        k = round(math.log(rate) / math.log1p(self.precision))
        return min(max(k, self.lowest), self.highest)


@dataclass(frozen=True)
class Search:
    """A search for the highest rate at which attainment is at least `target`."""

    lattice: Lattice
    target: float
    guess: int
    width: int = 1
    """The search ends when the crossing is between two places this far apart."""
    margin: int = 1
    """The number of further places measured on either side: resampled curves cross there."""

    def bracket(self, known: Mapping[int, float]) -> tuple[int | None, int | None]:
        """Return the last place that reaches the target and the first that does not.

        The measured curve is wavy from noise, so the nearest curve that never rises is used
        instead.  Either place is None if no measured place is of its kind.
        """
        places = sorted(known)
        if not places:
            return None, None
        curve = antitonic(np.array([known[k] for k in places]), np.ones(len(places)))
        reached = int((curve >= self.target).sum())
        return (
            places[reached - 1] if reached else None,
            places[reached] if reached < len(places) else None,
        )

    def next_places(self, known: Mapping[int, float]) -> list[int]:
        """Return the places to measure next, given attainment by place; none if it is over."""
        low, high = self.bracket(known)
        if low is None and high is None:
            return [self.guess]
        lattice = self.lattice
        if low is None or high is None:
            outward = (
                (high or 0) - self._stride(known) if low is None else low + self._stride(known)
            )
            place = min(max(outward, lattice.lowest), lattice.highest)
            return [] if place in known else [place]
        if high - low > self.width:
            return [(low + high) // 2]
        edges = {low - i for i in range(1, self.margin + 1)}
        edges |= {high + i for i in range(1, self.margin + 1)}
        return sorted(k for k in edges - known.keys() if lattice.lowest <= k <= lattice.highest)

    def num_left(self, known: Mapping[int, float]) -> int:
        """Estimate how many places are still to be measured."""
        if not self.next_places(known):
            return 0
        low, high = self.bracket(known)
        span = high - low if low is not None and high is not None else 4 * self._stride(known)
        return max(0, math.ceil(math.log2(max(1.0, span / self.width)))) + 2 * self.margin

    def _stride(self, known: Mapping[int, float]) -> int:
        """Return twice the range measured so far (at least twice the width): the search doubles."""
        return max(2 * self.width, 2 * (max(known, default=0) - min(known, default=0)))
