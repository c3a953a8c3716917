"""Upper bounds on the good requests of a trace: L1 fluid, and L2 on-time count."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from slosched.evaluate.bounds.demand import Demand
from slosched.evaluate.bounds.prices import FloatArray
from slosched.evaluate.bounds.program import IntArray, Program, spread

_MOST_SLOTS = 1 << 20
_BLOCK = 8
"""Slots in one block.  Later tokens are placed by block, as they have much more time."""
_MOST_VARIABLES = 40_000
"""The size of one linear program with its neighbours' requests, which takes a second or so."""

_ASSUMPTIONS = (
    "on each replica one step after another, each taking what the latency model says",
    "a latency model that is monotone in every field of the batch shape",
    "no more context in a step than the KV cache holds, and no prefix cache",
)


@dataclass(frozen=True, slots=True)
class Bound:
    """A number of requests of the trace that no scheduler can exceed serving well."""

    name: str
    num_good: int
    num_offered: int
    good_per_s: float
    """`num_good` over the time in which the load was offered; NaN if that time is zero."""
    assumptions: tuple[str, ...]
    sustained_per_s: float = math.nan
    """Good requests/s that no steady load of these lengths exceeds; NaN if it is not known."""

    @property
    def attainment(self) -> float:
        return self.num_good / self.num_offered


def fluid_bound(demand: Demand) -> Bound:
    """Return L1: the number of cheapest requests that fit between first arrival and last deadline.

    All tokens of good requests are computed in that time, at no less than the step prices: a
    fractional knapsack.  The constant time of a step is not charged, since slack that is banked
    before the first token lets a scheduler run fewer than 1 / TPOT steps a second.  Source: the
    fluid limit of Ao, Luo, Simchi-Levi and Wang (arXiv 2504.11320), on a finite trace.
    """
    work_s = (demand.first_work_s + demand.rest_work_s).sum()
    room = demand.num_devices * len(demand.release_s)
    sustained_per_s = room / work_s if work_s else math.nan
    bound = bound_of("L1 fluid", _fluid(demand), demand)
    return replace(bound, sustained_per_s=float(sustained_per_s))


def on_time_bound(demand: Demand, *, num_slots: int = 15) -> Bound:
    """Return L2: the most requests whose work fits into the device's time between release and due.

    Each request becomes two preemptive jobs on one processor of speed one: its prompt, due with
    the first token, and the rest, due with the last.  The greatest number of jobs on time
    (1 | r_j, pmtn | sum U_j) has a linear relaxation, which is bounded by its dual: with any price
    p(t) >= 0 of processor time, at most

        integral of p  +  sum over requests of max(0, 1 - work * (least p while it may run))

    requests are good; on a fleet the integral counts once for each device (`pooled`).  The prices
    come from the primal.  HiGHS solves it for a thousand requests or so at a time, together with
    their neighbours, on slots of which a job sees on average at most `num_slots`.  Wide slots, and
    prices that do not match where two programs meet, make the bound looser, never wrong.  L2 <= L1.
    """
    if num_slots < 1:
        raise ValueError(f"num_slots must be at least 1, not {num_slots}")
    least = _fluid(demand)
    horizon_s = _horizon_s(demand)
    if horizon_s > 0 and (_total_work_s(demand) > 0).any():
        least = min(least, _OnTime(demand, horizon_s, num_slots).least_dual())
    return bound_of("L2 on-time count", least, demand)


def bound_of(name: str, value: float, demand: Demand) -> Bound:
    """Make a `Bound` of at most `value` good requests, rounded down."""
    num_good = min(len(demand.release_s), math.floor(value + 1e-6))
    rate = num_good / demand.window_s if demand.window_s else math.nan
    return Bound(name, num_good, demand.num_offered, rate, _ASSUMPTIONS)


def _due_work_s(demand: Demand) -> tuple[FloatArray, FloatArray]:
    """Return the work of each prompt and of the rest, zero where it is never due."""
    first_s = np.where(np.isfinite(demand.first_due_s), demand.first_work_s, 0.0)
    rest_s = np.where(np.isfinite(demand.last_due_s), demand.rest_work_s, 0.0)
    return first_s, rest_s


def _total_work_s(demand: Demand) -> FloatArray:
    first_s, rest_s = _due_work_s(demand)
    return first_s + rest_s


def _horizon_s(demand: Demand) -> float:
    """Return the last finite due time, in seconds after the first arrival."""
    dues_s = np.concatenate([demand.first_due_s, demand.last_due_s])
    return float(dues_s[np.isfinite(dues_s)].max(initial=0.0))


def _fluid(demand: Demand) -> float:
    """Return the fluid bound without rounding."""
    work_s = np.sort(_total_work_s(demand))
    left_s = demand.num_devices * _horizon_s(demand) - np.cumsum(work_s)
    num_whole = int(np.searchsorted(-left_s, 0.0, side="right"))
    if num_whole == len(work_s):
        return float(num_whole)
    return num_whole + float(1 + left_s[num_whole] / work_s[num_whole])


class _OnTime:
    """The program of L2: two jobs a request on slots of equal width, and the price of each slot."""

    def __init__(self, demand: Demand, horizon_s: float, num_slots: int) -> None:
        self._works = _due_work_s(demand)
        dues_s = [demand.first_due_s, demand.last_due_s]
        # Work that is never due needs no slot, and says nothing of how wide slots should be.
        is_due = [np.isfinite(due_s) for due_s in dues_s]
        spans_s = [(d - demand.release_s)[due] for d, due in zip(dues_s, is_due, strict=True)]
        fine_s = float(np.median(spans_s[0])) / 4 if len(spans_s[0]) else 0.0
        mean_s = float(np.concatenate(spans_s).mean())
        self._num_slots = math.ceil(
            horizon_s / max(fine_s, mean_s / num_slots, horizon_s / _MOST_SLOTS)
        )
        self._width_s = horizon_s / self._num_slots
        self._room_s = demand.num_devices * self._width_s
        self._first = self._slot(demand.release_s)
        self._lasts = [
            np.where(due, self._slot(np.where(due, due_s, 0.0)), self._first)
            for due_s, due in zip(dues_s, is_due, strict=True)
        ]

    def _slot(self, time_s: FloatArray) -> IntArray:
        """Return the slot that contains the time.  A job may use all of its first and last slot."""
        slot: IntArray = (time_s / self._width_s).astype(np.int64)
        return np.minimum(slot, self._num_slots - 1)

    def least_dual(self) -> float:
        prices = self._prices()
        cost = np.zeros(len(self._first))
        for work_s, last in zip(self._works, self._lasts, strict=True):
            cost += work_s * _least_within(prices, self._first, last)
        return float(prices.sum() * self._room_s + np.maximum(0.0, 1 - cost).sum())

    def _prices(self) -> FloatArray:
        """Return the price of each slot, from the program of the requests released around it."""
        prices = np.zeros(self._num_slots)
        reach = int(np.quantile(self._lasts[1] - self._first, 0.9)) + 1
        num_slots, num_blocks = (
            self._lasts[0] - self._first,
            (self._lasts[1] - self._first) // _BLOCK,
        )
        num_variables = num_slots + num_blocks + 2
        part = np.cumsum(num_variables) // _MOST_VARIABLES
        starts = self._first[np.unique(part, return_index=True)[1]]
        starts[0] = 0
        for start, end in pairwise([*starts.tolist(), self._num_slots]):
            low, high = np.searchsorted(self._first, [start - reach, end + reach])
            slots, solved = self._solve(slice(int(low), int(high)))
            here = (start <= slots) & (slots < end)
            prices[slots[here]] = solved[here]
        return prices

    def _solve(self, requests: slice) -> tuple[IntArray, FloatArray]:
        """Return the slots that these requests may use, and their prices.

        Prompts are placed slot by slot, later tokens block by block.  Each block's sum is then
        placed in the slots of the block.
        """
        program = Program()
        first, (prompt_last, rest_last) = self._first[requests], self._lasts
        prompt_s, rest_s = self._works
        good = program.columns(len(first), gain=1.0, upper=1.0)
        slot, prompt = _place(program, good, prompt_s[requests], first, prompt_last[requests])
        block, rest = _place(
            program, good, rest_s[requests], first // _BLOCK, rest_last[requests] // _BLOCK
        )
        blocks, at_block = np.unique(block, return_inverse=True)
        inner = (blocks[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
        slots, at = np.unique(np.concatenate([slot, inner]), return_inverse=True)
        share = program.columns(len(inner))
        is_shared = program.rows(len(blocks), 0.0)
        program.add(is_shared[at_block], rest, 1.0)
        program.add(np.repeat(is_shared, _BLOCK), share, -1.0)
        is_free = program.rows(len(slots), self._room_s)
        program.add(is_free[at], np.concatenate([prompt, share]), 1.0)
        return slots, program.solve().prices[is_free]


def _place(
    program: Program, good: IntArray, work: FloatArray, first: IntArray, last: IntArray
) -> tuple[IntArray, IntArray]:
    """Add the work done in each slot that a job may use; return the slots and the variables.

    The work done adds up to work * good for each job that has any work.
    """
    owner, slot = spread(first, np.where(work > 0, last, first - 1))
    done = program.columns(len(owner))
    is_done = program.rows(len(first), 0.0)
    program.add(is_done, good, work)
    program.add(is_done[owner], done, -1.0)
    return slot, done


def _least_within(values: FloatArray, low: IntArray, high: IntArray) -> FloatArray:
    """Return the least of `values` in each [low, high], from two overlapping powers of two."""
    level = np.floor(np.log2(high - low + 1)).astype(np.int64)
    least = np.empty(len(low))
    for i in range(int(level.max(initial=0)) + 1):
        if i:
            values = np.minimum(values[: -(1 << (i - 1))], values[1 << (i - 1) :])
        mine = level == i
        least[mine] = np.minimum(values[low[mine]], values[high[mine] + 1 - (1 << i)])
    return least
