"""L5: the bound under endless load, whose decodes need a step for each token at their TPOT."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from slosched.core import Limits
from slosched.evaluate.bounds.demand import (
    Demand,
    demand_at,
    longest_context,
    shortest_step_s,
    token_weights,
    work_at,
)
from slosched.evaluate.bounds.intervals import Intervals, Jobs, Load
from slosched.evaluate.bounds.on_time import Bound, bound_of
from slosched.evaluate.bounds.prices import LegalSteps, StepPrices, StepTimes, legal_steps
from slosched.evaluate.bounds.program import IntArray, Program, spread
from slosched.workload.trace import Trace

_SLOTS_PER_REQUEST = 60
"""The average number of slots between a request's arrival and its last due time."""
_MOST_SLOTS = 1 << 17
"""The number of slots of a period, at most: between two requests days may pass.  Wider ones make
the bound looser, never wrong."""
_MOST_MARKS = 256
"""The number of places in a period at which intervals may begin and end, at most."""
_MOST_STEPS = 12
"""The search's reach above and below the trace's own rate, in factors of e."""
_TOKENS_PER_STEP = (100, 200, 400, 800, 1600)
"""Sizes of steps for which the prices are made tight."""


class Pace:
    """A trace that is repeated without end, and the steps that its decodes need.

    L1 and L2 do not charge the constant time of a step, and on a finite trace decodes may go on
    after the last arrival, without competition.  A server under lasting load has neither advantage.

    Proof that no schedule beats L5.  Take any schedule of the endless repetition, and the mean over
    its first K periods of what it does in each slot of a period.  A good request of n tokens emits
    all but the first in n - 1 steps between its arrival and its last due time.  So at least this
    number of steps lies in the slots that this time touches.  All steps, each at the price of a
    step, and the work of all good requests at the same prices fit into the period; their tokens fit
    into the steps.  In any shorter interval, its steps and the work that is both released and due
    inside of it fit into it as well: prompts between arrival and TTFT, later tokens by the last due
    time.  An interval that begins at the same time of every period meets the same requests in each,
    so that this holds for the mean, too.  So the mean is a solution of the program, except for the
    requests that have not ended when the last period ends.  Their share vanishes as K grows.
    Memory and seats are in the prices, since no step holds more of either.  The bound assumes one
    replica, one step at a time and no prefix cache.
    """

    def __init__(
        self, trace: Trace, model: StepTimes, limits: Limits, kv_tokens: int | None = None
    ) -> None:
        if not math.isfinite(trace.rate):
            raise ValueError(
                f"trace {trace.name!r} arrives in one instant: nothing says when it comes again"
            )
        steps = legal_steps(model, limits, longest_context(trace), kv_tokens)
        self._trace, self._limits = trace, limits
        self._prices = _prices(steps, trace)
        mean_price = steps.dearest(token_weights(trace))
        self._demand = demand_at(mean_price, shortest_step_s(model), trace, limits, kv_tokens)

    def bound(self, rate: float) -> Bound:
        """Return the bound of one repetition at `rate` offered requests/s."""
        demand = self._demand.at_speed(rate / self._trace.rate)
        later = (self._trace.output_tokens[demand.index] - 1).astype(np.float64)
        is_due = np.isfinite(demand.last_due_s) & (later > 0)
        span_s = np.where(is_due, demand.last_due_s - demand.release_s, 0.0)
        mean_span_s = float(span_s[is_due].mean()) if is_due.any() else demand.window_s
        fine_slots = demand.window_s * _SLOTS_PER_REQUEST / mean_span_s
        num_slots = math.ceil(min(fine_slots, _MOST_SLOTS))
        slots_per_mark = math.ceil(num_slots / _MOST_MARKS)
        num_marks = math.ceil(num_slots / slots_per_mark)
        num_slots = num_marks * slots_per_mark
        width_s = demand.window_s / num_slots
        first: IntArray = (demand.release_s / width_s).astype(np.int64)
        last: IntArray = ((demand.release_s + span_s) / width_s).astype(np.int64)
        program = Program()
        good = program.columns(len(first), gain=1.0, upper=1.0)
        steps = program.columns(num_slots)
        self._fit_into_period(program, good, steps, demand.index, demand.window_s, is_due)
        owner, slot = spread(first, np.where(is_due, last, first - 1))
        enough = program.rows(len(first), 0.0)
        program.add(enough[is_due], good[is_due], later[is_due])
        program.add(enough[owner], steps[slot % num_slots], -1.0)
        mark_s = width_s * slots_per_mark
        loads = self._loads(demand, mark_s, is_due)
        intervals = Intervals(program, good, steps, loads, mark_s, num_marks)
        return bound_of("L5 pace", intervals.most_good() * (1 + 1e-6) + 1e-4, demand)

    def capacity(self, attainment: float, tolerance: float = 0.005) -> float:
        """Return a rate above which no schedule reaches the attainment, in requests/s.

        It is inf if there is no such rate.  The bound falls with the rate, so a bisection to a
        share of `tolerance` finds it.  Its upper end is returned, which makes the result a proof.
        """
        if not 0 < attainment <= 1:
            raise ValueError(f"attainment must be a share in (0, 1], not {attainment!r}")

        def excess(log_rate: float) -> float:
            return self.bound(math.exp(log_rate)).num_good - attainment * len(self._trace)

        at = math.log(self._trace.rate)
        low = next((at - i for i in range(_MOST_STEPS) if excess(at - i) >= 0), None)
        if low is None:
            return 0.0
        high = next((at + i for i in range(_MOST_STEPS) if excess(at + i) < 0), None)
        if high is None:
            return math.inf
        while high - low > tolerance:
            middle = (low + high) / 2
            low, high = (middle, high) if excess(middle) >= 0 else (low, middle)
        return math.exp(high)

    def _loads(self, demand: Demand, mark_s: float, is_due: npt.NDArray[np.bool_]) -> list[Load]:
        """Return the prompts and the later tokens as jobs, at each of the prices."""
        has_ttft = np.isfinite(demand.first_due_s)
        owner = np.concatenate([np.flatnonzero(has_ttft), np.flatnonzero(is_due)])
        due_s = np.concatenate([demand.first_due_s[has_ttft], demand.last_due_s[is_due]])
        released: IntArray = (demand.release_s[owner] / mark_s).astype(np.int64)
        due: IntArray = (due_s / mark_s).astype(np.int64)
        loads = []
        for price in self._prices:
            first_s, rest_s = (work[demand.index] for work in work_at(price, self._trace))
            work_s = np.concatenate([first_s[has_ttft], rest_s[is_due]])
            loads.append(Load(Jobs(released, due, owner, work_s), price.per_step_s))
        return loads

    def _fit_into_period(
        self,
        program: Program,
        good: IntArray,
        steps: IntArray,
        index: IntArray,
        period_s: float,
        is_due: npt.NDArray[np.bool_],
    ) -> None:
        trace = self._trace
        for price in self._prices:
            first_s, rest_s = (work[index] for work in work_at(price, trace))
            (row,) = program.rows(1, period_s)
            program.add(np.full_like(good, row), good, first_s + np.where(is_due, rest_s, 0.0))
            program.add(np.full_like(steps, row), steps, price.per_step_s)
        tokens = trace.prompt_tokens[index] + np.where(is_due, trace.output_tokens[index] - 1, 0)
        (row,) = program.rows(1, 0.0)
        program.add(np.full_like(good, row), good, tokens / self._limits.max_num_batched_tokens)
        program.add(np.full_like(steps, row), steps, -1.0)


def _prices(steps: LegalSteps, trace: Trace) -> list[StepPrices]:
    """Return prices for the trace's mix in steps of several sizes, and without a price of steps."""
    weights = token_weights(trace)
    step = np.array([0.0, 0.0, 0.0, 0.0, 1.0])
    sizes = [weights + weights[:2].sum() / size * step for size in _TOKENS_PER_STEP]
    return list(dict.fromkeys(steps.dearest(mix) for mix in (weights, *sizes)))
