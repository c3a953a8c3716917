"""A monotone table of the time outside attention over a count of tokens or requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slosched.perfmodel.columns import Array


@dataclass(frozen=True)
class Table:
    """Seconds at some counts, with straight lines between them; they never fall.

    Left of the first count the first value holds; right of the last one the line goes on with
    `slope_s`.
    """

    kind: ClassVar[str] = "profiled"
    counts: tuple[int, ...]
    times_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.times_s) or not self.counts:
            raise ValueError(
                f"a table needs as many times as counts, at least one: {len(self.counts)} counts, "
                f"{len(self.times_s)} times"
            )
        if list(self.counts) != sorted(set(self.counts)) or self.counts[0] < 0:
            raise ValueError(f"the counts of a table must rise from 0 or more: {self.counts}")
        if list(self.times_s) != sorted(self.times_s) or self.times_s[0] < 0:
            raise ValueError("the times of a table must not fall or be negative")

    @property
    def slope_s(self) -> float:
        """Return the seconds per unit beyond the last count, from the upper half of the table."""
        low = _slope_from(len(self.counts))
        span = self.counts[-1] - self.counts[low]
        return (self.times_s[-1] - self.times_s[low]) / span if span else 0.0

    def at(self, counts: Array) -> Array:
        """Return the seconds at each of `counts`."""
        inside = np.interp(counts, self.counts, self.times_s)
        return np.asarray(inside + self.slope_s * np.maximum(0, counts - self.counts[-1]))


class Knots:
    """The counts of tables of different times, which are read at the same places.

    A fit reads many such tables, so what depends on counts alone is computed once.
    """

    def __init__(self, counts: Sequence[int], places: Array) -> None:
        knots = np.array(counts, dtype=np.float64)
        self._slope_from = _slope_from(len(knots))
        spans = np.append(np.diff(knots), knots[-1] - knots[self._slope_from])
        self._spans = np.where(spans > 0, spans, np.inf)
        self._knot = np.maximum(0, np.searchsorted(knots, places, side="right") - 1)
        self._beyond = np.maximum(0.0, places - knots[self._knot])

    def read(self, times_s: Array) -> Array:
        """Return what `Table.at` returns, for k tables at once: from times of shape (k, knots)."""
        last_s = times_s[:, -1:] - times_s[:, self._slope_from, None]
        slopes_s = np.hstack([np.diff(times_s), last_s]) / self._spans
        return np.asarray(slopes_s[:, self._knot] * self._beyond + times_s[:, self._knot])


def _slope_from(num_counts: int) -> int:
    """Return the index of the count from which on a table's slope beyond its end is taken."""
    return num_counts // 2 - (num_counts % 2 == 0 and num_counts > 1)


def monotone_table(counts: Sequence[int], seconds: Sequence[float]) -> Table:
    """Return the never-falling table closest to measured times; equal counts are averaged."""
    from scipy.optimize import isotonic_regression  # slow to import, only for a fit

    values: dict[int, list[float]] = {}
    for count, second in zip(counts, seconds, strict=True):
        values.setdefault(int(count), []).append(second)
    knots = sorted(values)
    means = np.array([np.mean(values[knot]) for knot in knots])
    # Weights 1/t²: the distance is relative, as in every fit here.
    smooth = isotonic_regression(means, weights=means**-2.0).x
    return Table(tuple(knots), tuple(float(s) for s in np.maximum.accumulate(smooth)))
