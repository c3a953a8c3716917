"""Capacities made from replays: curves, intervals, ratios and the flags that qualify them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np
import pandas as pd

from slosched.evaluate.capacity.measured import Measured
from slosched.evaluate.capacity.outcomes import BoolArray, Outcomes
from slosched.evaluate.capacity.windows import blocks_of
from slosched.evaluate.statistics import (
    NUM_REPLICATES,
    FloatArray,
    IntArray,
    Interval,
    antitonic,
    block_weights,
    crossing,
    interval,
    rises,
)
from slosched.workload.trace import Trace

_MIN_QUEUE = 1.0
"""The least mean number of waiting requests at the end for which a queue is said to grow."""


class Flag(StrEnum):
    """A restriction under which a capacity must be read."""

    UNREACHABLE = "unreachable"
    """No rate reaches the target, so the capacity is 0."""
    NEVER_SATURATES = "never saturates"
    """The highest rate tried still reaches the target, so the capacity is at least that rate."""
    QUEUE_GROWS = "queue grows"
    """The queue still grows at the last rate that reaches the target.

    A longer trace would give a lower capacity."""
    SHORT = "short"
    """The replay is too short to warm up before half of it is over."""


@dataclass(frozen=True)
class Capacity:
    """The highest rate at which at least `target` of the offered requests are good."""

    contender: str
    target: float
    requests_per_s: float
    interval: Interval
    flags: frozenset[Flag]
    best_attainment: float
    """The best attainment at any rate tried."""

    @property
    def is_measured(self) -> bool:
        """Tell whether the curve crosses the target within the rates tried."""
        return not self.flags & {Flag.UNREACHABLE, Flag.NEVER_SATURATES}


@dataclass(frozen=True)
class Ratio:
    """One capacity over another, on the same requests."""

    value: float
    interval: Interval

    @property
    def is_significant(self) -> bool:
        """Tell whether there is a ratio and its interval excludes 1."""
        return not math.isnan(self.value) and 1.0 not in self.interval


@dataclass(frozen=True, eq=False)
class _Curve:
    """Good and counted requests at each rate, by block; arrays of shape (rates, blocks)."""

    rates: FloatArray
    good: FloatArray
    counted: FloatArray
    grows: tuple[bool, ...]
    short: tuple[bool, ...]

    def resampled(self, weights: IntArray) -> FloatArray:
        """Return attainment in each replicate, made never to rise: shape (replicates, rates)."""
        sizes = np.maximum(weights @ self.counted.T, 1e-9)
        return antitonic(weights @ self.good.T / sizes, sizes)

    @cached_property
    def pooled(self) -> FloatArray:
        one = np.ones((1, self.good.shape[1]), dtype=np.int64)
        curve: FloatArray = self.resampled(one)[0]
        return curve


class Study:
    """The results of a sweep; all contenders are judged on the same resampled blocks."""

    def __init__(
        self,
        measured: Sequence[Measured],
        windows: Sequence[Trace],
        *,
        seed: int = 0,
        judged: Sequence[BoolArray] | None = None,
    ) -> None:
        """Prepare the results of all contenders that played all windows at one rate at least.

        `judged` marks the requests of each window that counted in the sweep.  Raises ValueError if
        there is no such contender.
        """
        self.windows = windows
        self.num_seeds = len(windows)
        by_window = [blocks_of(window) for window in windows]
        sizes = [int(blocks.max()) + 1 for blocks in by_window]
        if judged is not None:
            by_window = [blocks[mine] for blocks, mine in zip(by_window, judged, strict=True)]
        offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]])
        blocks = [b + offset for b, offset in zip(by_window, offsets, strict=True)]
        curves = {m.name: _curve(m, blocks, sum(sizes)) for m in measured if m.complete}
        if not curves:
            raise ValueError("no contender was played at any rate by all windows")
        # Blocks in which all contenders warm up would be drawn to no purpose.
        used = np.any([curve.counted.any(axis=0) for curve in curves.values()], axis=0)
        seed_of = np.repeat(np.arange(len(windows)), sizes)[used]
        self._weights = block_weights(_renumbered(seed_of), NUM_REPLICATES, seed)
        self._curves = {
            name: _Curve(c.rates, c.good[:, used], c.counted[:, used], c.grows, c.short)
            for name, c in curves.items()
        }

    @property
    def contenders(self) -> list[str]:
        return list(self._curves)

    def capacity(self, contender: str, target: float) -> Capacity:
        """Return the capacity with its 95 % interval; it is 0 if no rate reaches the target."""
        curve = self._curves[contender]
        reached = int((curve.pooled >= target).sum())
        flags = self._flags(curve, reached)
        best = float((curve.good.sum(axis=1) / curve.counted.sum(axis=1)).max())
        if Flag.UNREACHABLE in flags:
            return Capacity(contender, target, 0.0, Interval(0.0, 0.0), flags, best)
        value = float(crossing(curve.rates, curve.pooled, target))
        if Flag.NEVER_SATURATES in flags:
            return Capacity(contender, target, value, Interval(value, math.inf), flags, best)
        bounds = _from_zero(interval(self.replicates(contender, target), value, self.num_seeds))
        return Capacity(contender, target, value, bounds, flags, best)

    def replicates(self, contender: str, target: float) -> FloatArray:
        """Return the capacity in each replicate, shape (replicates,)."""
        curve = self._curves[contender]
        return crossing(curve.rates, curve.resampled(self._weights), target)

    def ratio(self, contender: str, reference: str, target: float) -> Ratio:
        """Return the capacity over that of `reference`, paired: both in the same replicates."""
        return _ratio(self, contender, self, reference, target)

    def ratio_to(self, other: Study, contender: str, reference: str, target: float) -> Ratio:
        """Return the capacity over one of another study with other windows or seeds: not paired."""
        return _ratio(self, contender, other, reference, target)

    def goodput_ratio(self, contender: str, reference: str, rate: float) -> Ratio:
        """Return good requests over those of `reference`, paired, at a rate that both played.

        The interval has no upper end if in too many replicates `reference` serves nothing well.
        """
        if contender == reference:
            return Ratio(1.0, Interval(1.0, 1.0))
        above, below = (self._good_shares(name, rate) for name in (contender, reference))
        if not below[0]:
            return Ratio(math.nan, Interval(math.nan, math.nan))
        value = float(above[0] / below[0])
        drawn_above, drawn_below = above[1:], below[1:]
        has_any = (drawn_above > 0) | (drawn_below > 0)  # the others say nothing
        worlds = np.full(len(drawn_above), np.inf)
        np.divide(drawn_above, drawn_below, out=worlds, where=drawn_below > 0)
        return Ratio(value, _from_zero(interval(worlds[has_any], value, self.num_seeds)))

    def _good_shares(self, contender: str, rate: float) -> FloatArray:
        """Return the measured attainment, then that of each replicate: shape (1 + replicates,)."""
        curve = self._curves[contender]
        (place,) = np.flatnonzero(curve.rates == rate)
        good, counted = curve.good[place], curve.counted[place]
        worlds = self._weights @ good / np.maximum(self._weights @ counted, 1e-9)
        return np.concatenate([[good.sum() / counted.sum()], worlds])

    def frame(self) -> pd.DataFrame:
        """Return attainment and good requests/s by policy and rate, with 95 % bounds."""
        rows = []
        for name, curve in self._curves.items():
            sizes = np.maximum(self._weights @ curve.counted.T, 1e-9)
            worlds = self._weights @ curve.good.T / sizes
            shares = curve.good.sum(axis=1) / curve.counted.sum(axis=1)
            for i, rate in enumerate(curve.rates):
                bounds = interval(worlds[:, i], float(shares[i]), self.num_seeds)
                low, high = max(0.0, bounds.low), min(1.0, bounds.high)
                rows.append(
                    {
                        "policy": name,
                        "rate": rate,
                        "attainment": shares[i],
                        "attainment_low": low,
                        "attainment_high": high,
                        "good_requests_per_s": rate * shares[i],
                        "good_low": rate * low,
                        "good_high": rate * high,
                        "queue_grows": curve.grows[i],
                        "short": curve.short[i],
                    }
                )
        return pd.DataFrame(rows)

    def _flags(self, curve: _Curve, reached: int) -> frozenset[Flag]:
        if not reached:
            return frozenset({Flag.UNREACHABLE})
        found = {Flag.NEVER_SATURATES} if reached == len(curve.rates) else set()
        if curve.grows[reached - 1]:
            found.add(Flag.QUEUE_GROWS)
        if curve.short[reached - 1]:
            found.add(Flag.SHORT)
        return frozenset(found)


def _ratio(study: Study, contender: str, other: Study, reference: str, target: float) -> Ratio:
    above, below = study.capacity(contender, target), other.capacity(reference, target)
    if not (above.is_measured and below.is_measured):
        return Ratio(math.nan, Interval(math.nan, math.nan))
    value = above.requests_per_s / below.requests_per_s
    if study is other and contender == reference:
        return Ratio(1.0, Interval(1.0, 1.0))
    worlds = study.replicates(contender, target) / other.replicates(reference, target)
    num_seeds = min(study.num_seeds, other.num_seeds)
    return Ratio(value, _from_zero(interval(worlds, value, num_seeds)))


def _from_zero(found: Interval) -> Interval:
    """Cut what few seeds widened below 0, where neither a capacity nor a ratio of two can be."""
    return Interval(max(0.0, found.low), found.high)


def _curve(measured: Measured, blocks: Sequence[IntArray], num_blocks: int) -> _Curve:
    rates, good, counted, grows, short = [], [], [], [], []
    for k in measured.complete:
        found = [measured.outcomes[k][i] for i in range(len(blocks))]
        rates.append(measured.lattice.rate(k))
        good.append(_per_block(found, blocks, num_blocks, good=True))
        counted.append(_per_block(found, blocks, num_blocks, good=False))
        grows.append(_queue_grows(found))
        short.append(any(outcomes.is_short for outcomes in found))
    return _Curve(np.array(rates), np.array(good), np.array(counted), tuple(grows), tuple(short))


def _per_block(
    found: Sequence[Outcomes], blocks: Sequence[IntArray], num_blocks: int, *, good: bool
) -> FloatArray:
    """Count the counted requests of each block or, with `good`, the good ones among them."""
    total = np.zeros(num_blocks)
    for outcomes, block in zip(found, blocks, strict=True):
        chosen = outcomes.counted & outcomes.good if good else outcomes.counted
        total += np.bincount(block[chosen], minlength=num_blocks)
    return total


def _queue_grows(found: Sequence[Outcomes]) -> bool:
    """Tell whether the queue rises over time in the mean of all windows.

    Windows of so few requests that their parts differ in number tell nothing.
    """
    each = [outcomes.queue_means() for outcomes in found]
    if len({len(means) for means in each}) > 1:
        return False
    means = np.mean(each, axis=0)
    return bool(means[-1] >= _MIN_QUEUE) and rises(means)


def _renumbered(seed_of: IntArray) -> IntArray:
    """Number the seeds that are left from 0, without gaps."""
    return np.unique(seed_of, return_inverse=True)[1].astype(np.int64)
