"""Upper bounds on the good requests of a trace: L1 fluid, and L2 on-time count."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slosched.evaluate.bounds.demand import Demand
from slosched.evaluate.bounds.prices import FloatArray

_ASSUMPTIONS = (
    "one replica, steps one after another, each taking what the latency model says",
    "a latency model that is monotone in every field of the batch shape",
    "no prefix cache",
)


@dataclass(frozen=True, slots=True)
class Bound:
    """No scheduler serves more requests of the trace well."""

    name: str
    num_good: int
    num_offered: int
    good_per_s: float
    """`num_good` over the time in which the load was offered; NaN if that is no time at all."""
    assumptions: tuple[str, ...]

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_offered


def fluid_bound(demand: Demand) -> Bound:
    """L1: the cheapest requests whose work fits between the first arrival and the last deadline.

    Good requests compute all their tokens in that time, at no less than the step prices: a
    fractional knapsack.  The constant time of a step is not charged, since slack that is banked
    before the first token lets a scheduler run fewer steps than 1 / TPOT a second.  Source: the
    fluid limit of Ao, Luo, Simchi-Levi and Wang (2504.11320), on a finite trace.
    """
    return _bound("L1 fluid", _fluid(demand)[0], demand)


def on_time_bound(demand: Demand, *, num_slots: int = 2048, num_rounds: int = 400) -> Bound:
    """L2: the most requests whose work fits into the processor's time between release and due.

    Each request becomes two preemptive jobs on one processor of speed one: its prompt, due with
    the first token, and the rest, due with the last.  The linear relaxation of the greatest number
    on time (1 | r_j, pmtn | sum U_j) is bounded by its dual: with any price p(t) >= 0 of processor
    time, at most

        integral of p  +  sum over requests of max(0, 1 - work * (least p while it may run))

    requests are good.  p is constant on at most `num_slots` slots and improved by subgradient
    steps from L1's constant price, so L2 <= L1; stopping early leaves it looser, never wrong.
    """
    if num_slots < 1 or num_rounds < 0:
        raise ValueError(
            f"num_slots must be >= 1 and num_rounds >= 0, not {num_slots} and {num_rounds}"
        )
    least, price = _fluid(demand)
    horizon_s = _horizon_s(demand)
    work_s = float(_total_work_s(demand).sum())
    if work_s > 0 and horizon_s > 0:
        price = price or len(demand.release_s) / work_s
        least = min(least, _Dual(demand, horizon_s, num_slots).descend(price, num_rounds))
    return _bound("L2 on-time count", least, demand)


def _bound(name: str, value: float, demand: Demand) -> Bound:
    num_good = min(len(demand.release_s), math.floor(value + 1e-6))
    rate = num_good / demand.window_s if demand.window_s else math.nan
    return Bound(name, num_good, demand.num_offered, rate, _ASSUMPTIONS)


def _due_work_s(demand: Demand) -> tuple[FloatArray, FloatArray]:
    """First and rest work, zero where it is never due."""
    first_s = np.where(np.isfinite(demand.first_due_s), demand.first_work_s, 0.0)
    rest_s = np.where(np.isfinite(demand.last_due_s), demand.rest_work_s, 0.0)
    return first_s, rest_s


def _total_work_s(demand: Demand) -> FloatArray:
    first_s, rest_s = _due_work_s(demand)
    return first_s + rest_s


def _horizon_s(demand: Demand) -> float:
    """From the first arrival, at zero, to the last due time that there is."""
    dues_s = np.concatenate([demand.first_due_s, demand.last_due_s])
    return float(dues_s[np.isfinite(dues_s)].max(initial=0.0))


def _fluid(demand: Demand) -> tuple[float, float]:
    """The bound, not rounded, and the price of a second at which it is reached."""
    work_s = np.sort(_total_work_s(demand))
    left_s = _horizon_s(demand) - np.cumsum(work_s)
    num_whole = int(np.searchsorted(-left_s, 0.0, side="right"))
    if num_whole == len(work_s):
        return float(num_whole), 0.0
    return num_whole + float(1 + left_s[num_whole] / work_s[num_whole]), 1 / work_s[num_whole]


class _Dual:
    """The dual of the on-time count, as a function of the price of each slot."""

    def __init__(self, demand: Demand, horizon_s: float, num_slots: int) -> None:
        dues_s = [np.minimum(due, horizon_s) for due in (demand.first_due_s, demand.last_due_s)]
        times_s = np.unique(np.concatenate([[0.0, horizon_s], demand.release_s, *dues_s]))
        # Slots between releases and dues lose nothing; of too many, evenly spread ones stay.
        kept = np.linspace(0, len(times_s) - 1, min(num_slots + 1, len(times_s)))
        edges_s = times_s[np.unique(kept.astype(np.int64))]
        self._widths_s = np.diff(edges_s)
        self._works = _due_work_s(demand)
        start = np.searchsorted(edges_s, demand.release_s, side="right") - 1
        self._ranges = [(start, np.searchsorted(edges_s, due) - 1) for due in dues_s]

    def descend(self, price: float, num_rounds: int) -> float:
        """The least value that was seen, from the same price in every slot."""
        prices = np.full(len(self._widths_s), price)
        mean = prices.copy()
        least, gradient = self._evaluate(prices)
        for i in range(1, num_rounds + 1):
            prices = np.maximum(0.0, prices - price * i**-0.5 * np.clip(gradient, -2, 1))
            mean += (prices - mean) * 3 / (i + 3)
            value, gradient = self._evaluate(prices)
            least = min(least, value, self._evaluate(mean)[0])
        return least

    def _evaluate(self, prices: FloatArray) -> tuple[float, FloatArray]:
        """The dual's value and its subgradient, per second of each slot."""
        cheapest = [_argmin_within(prices, *ends) for ends in self._ranges]
        cost = sum(w * prices[at] for w, at in zip(self._works, cheapest, strict=True))
        gain = 1 - np.asarray(cost)
        served = gain > 0
        gradient = np.ones(len(prices))
        for work_s, at in zip(self._works, cheapest, strict=True):
            used_s = np.bincount(at[served], work_s[served], minlength=len(prices))
            gradient -= used_s / self._widths_s
        return float(prices @ self._widths_s + gain[served].sum()), gradient


def _argmin_within(
    values: FloatArray, low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Where `values` is least in each [low, high]: two overlapping spans of a power of two."""
    level = np.floor(np.log2(high - low + 1)).astype(np.int64)
    best = np.arange(len(values))
    found = np.empty_like(low)
    for i in range(int(level.max(initial=0)) + 1):
        if i:
            left, right = best[: -(1 << (i - 1))], best[1 << (i - 1) :]
            best = np.where(values[left] <= values[right], left, right)
        mine = level == i
        left, right = best[low[mine]], best[high[mine] + 1 - (1 << i)]
        found[mine] = np.where(values[left] <= values[right], left, right)
    return found
