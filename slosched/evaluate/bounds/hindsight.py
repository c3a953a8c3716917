"""L3: the hindsight linear program, which has steps, seats and KV cache slot by slot."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from slosched.core import DeadlineRule, Limits
from slosched.evaluate.bounds.demand import (
    Demand,
    demand_at,
    longest_context,
    shortest_step_s,
    token_weights,
)
from slosched.evaluate.bounds.on_time import Bound, bound_of
from slosched.evaluate.bounds.prices import (
    FloatArray,
    LegalSteps,
    StepPrices,
    StepTimes,
    legal_steps,
)
from slosched.evaluate.bounds.program import IntArray, Program, spread
from slosched.workload.trace import Trace

_SLOTS_PER_TTFT = 3
_MOST_SLOTS_PER_REQUEST = 12
"""An average; more slots make the bound a little tighter and much slower."""
_TOKENS_PER_STEP = 200
"""The size of step for which the price of a step is sought.

At smaller sizes the price of the step would be all that is left.
"""


def hindsight_bound(
    trace: Trace,
    model: StepTimes,
    limits: Limits,
    kv_tokens: int | None = None,
    *,
    num_requests: int = 300,
) -> Bound:
    """Return L3: the linear relaxation of the best schedule that knows all arrivals and lengths.

    Proof that no schedule beats it.  Take any schedule and keep only what it does for its good
    requests.  A step may overlap several slots of time.  Then each slot gets the share of the step
    that passes in it: of the step itself, of its tokens and of its time.  In every slot

    * the cost of the steps, at any prices that no legal step undercuts, fits into the slot.  This
      holds for each of several such prices, and here a step has a price, too;
    * no request emits more tokens than there are steps, since each step gives it at most one;
    * tokens, decodes and the contexts of decodes do not exceed what one step may hold, times the
      steps.

    A request's tokens come in steps that begin after its arrival and end by their due time, which
    is rounded up to the end of its slot.  All of its prompt comes before its second token.  So the
    schedule is a solution of the program in which each good request counts 1, and the optimum is no
    less.  A preempted request pays for a decode even where it computes its context anew.  Where
    computing anew would be cheaper at some prices, these prices are lowered for it.

    Longer traces are cut into parts of `num_requests`, and every part has the device for itself.
    What a schedule does for one part is a solution of that part's program, so the sum of the optima
    is a bound.  Smaller parts are faster and looser: 300 requests take some 10 s.
    """
    if num_requests < 1:
        raise ValueError(f"num_requests must be at least 1, not {num_requests}")
    steps = legal_steps(model, limits, longest_context(trace), kv_tokens)
    mean_price = steps.dearest(token_weights(trace))
    demand = demand_at(mean_price, shortest_step_s(model), trace, limits, kv_tokens)
    prices = _several_prices(steps, trace)
    cuts = [*range(0, len(demand.release_s), num_requests), len(demand.release_s)]
    total = sum(
        _Part(trace, demand, slice(*ends), prices, limits, kv_tokens).most_good()
        for ends in pairwise(cuts)
    )
    return bound_of("L3 hindsight", total * (1 + 1e-6) + 1e-4, demand)


def _several_prices(steps: LegalSteps, trace: Trace) -> list[StepPrices]:
    """Return prices for the trace's mix and for variants of it, with and without a step's price."""
    weights = token_weights(trace)
    prompts, decodes = weights * [1, 0, 1, 0, 0], weights * [0, 1, 0, 1, 0]
    step = np.array([0.0, 0.0, 0.0, 0.0, 1.0])
    mixes = [prompts + share * decodes for share in (0.0, 0.1, 0.3, 1.0)]
    num_steps = float(weights[:2].sum()) / _TOKENS_PER_STEP
    mixes += [weights + num_steps * step, decodes + num_steps * step, step]
    return list(dict.fromkeys(steps.dearest(mix) for mix in mixes))


@dataclass(frozen=True)
class _Need:
    """An amount that each request needs in full, as its shares in slots first … last."""

    owner: IntArray
    slot: IntArray
    share: IntArray
    """Columns of the program; like owner and slot of shape (pairs of owner and slot,)."""
    amount: FloatArray
    """The amount that each request needs, shape (requests,)."""


class _Part:
    """The linear program of some requests of a trace."""

    def __init__(
        self,
        trace: Trace,
        demand: Demand,
        part: slice,
        prices: Sequence[StepPrices],
        limits: Limits,
        kv_tokens: int | None,
    ) -> None:
        self._limits, self._kv_tokens, self._prices = limits, kv_tokens, prices
        index = demand.index[part]
        self._prompts = trace.prompt_tokens[index].astype(np.float64)
        self._later = (trace.output_tokens[index] - 1).astype(np.float64)
        self._tpot_s = np.array([trace.requests[i].slo.tpot_s for i in index])
        start_s = float(demand.release_s[part][0])
        release_s, first_due_s, last_due_s = (
            times[part] - start_s
            for times in (demand.release_s, demand.first_due_s, demand.last_due_s)
        )
        self._first_due_s = first_due_s
        dues_s = np.concatenate([release_s, first_due_s, last_due_s])
        self._horizon_s = float(dues_s[np.isfinite(dues_s)].max()) or 1.0
        ends_s = [np.minimum(due, self._horizon_s) for due in (first_due_s, last_due_s)]
        spans_s = [float(np.median(ends_s[0] - release_s)) / _SLOTS_PER_TTFT]
        spans_s.append(float((ends_s[1] - release_s).mean()) / _MOST_SLOTS_PER_REQUEST)
        num_slots = math.ceil(self._horizon_s / max(spans_s))
        self._width_s = self._horizon_s / num_slots
        first, prompt_last, rest_last = (
            np.minimum((time_s / self._width_s).astype(np.int64), num_slots - 1)
            for time_s in (release_s, *ends_s)
        )
        # Work that is never due need not be done, and nothing comes after a single token.
        prompt_last = np.where(np.isfinite(first_due_s), prompt_last, first - 1)
        is_due = np.isfinite(last_due_s) & (self._later > 0)
        rest_last = np.where(is_due, rest_last, first - 1)
        # Only slots with something to do count, since days may pass between two requests.
        used = np.unique(spread(first, np.maximum(prompt_last, rest_last))[1])
        self._num_slots = len(used)
        self._slot_end_s = (used + 1) * self._width_s
        self._first = np.searchsorted(used, first)
        self._prompt_last = self._first + (prompt_last - first)
        self._rest_last = self._first + (rest_last - first)

    def most_good(self) -> float:
        program = Program()
        good = program.columns(len(self._first), gain=1.0, upper=1.0)
        p, later = self._prompts, self._later
        prompt = self._need(program, good, self._prompt_last, p)
        pairs = self._need(program, good, self._prompt_last, p * (p + 1) / 2)
        tokens = self._need(program, good, self._rest_last, later)
        contexts = self._need(program, good, self._rest_last, later * (p + (later + 1) / 2))
        steps = program.columns(self._num_slots)
        for price in self._prices:
            full = program.rows(self._num_slots, self._width_s)
            program.add(full, steps, price.per_step_s)
            decode_s, context_s = self._decode_prices(price)
            _use(program, full, prompt, price.per_prefill_token_s)
            _use(program, full, pairs, price.per_pair_s)
            _use(program, full, tokens, decode_s)
            _use(program, full, contexts, context_s)
        held = (
            (self._limits.max_num_batched_tokens, (prompt, tokens)),
            (self._limits.max_num_seqs, (tokens,)),
            (self._kv_tokens, (contexts,)),
        )
        for most, needs in held:
            if most is not None:
                full = program.rows(self._num_slots, 0.0)
                program.add(full, steps, -1.0)
                for need in needs:
                    _use(program, full, need, 1.0 / most)
        alone = program.rows(len(tokens.slot), 0.0)
        program.add(alone, tokens.share, later[tokens.owner])
        program.add(alone, steps[tokens.slot], -1.0)
        self._prompt_first(program, prompt, tokens)
        if self._limits.deadline_rule is DeadlineRule.ENVELOPE:
            self._each_token_due(program, good, tokens)
        return program.solve().value

    def _need(self, program: Program, good: IntArray, last: IntArray, amount: FloatArray) -> _Need:
        owner, slot = spread(self._first, last)
        share = program.columns(len(owner))
        needed = last >= self._first
        row = program.rows(len(good), 0.0)
        program.add(row[needed], good[needed], 1.0)
        program.add(row[owner], share, -1.0)
        return _Need(owner, slot, share, amount)

    def _decode_prices(self, price: StepPrices) -> tuple[FloatArray, FloatArray]:
        """Return the prices of a token and of a token of context, by request.

        They are no more than computing anew would cost.  Whether decode(k) <= anew(k), the price of
        computing a context of k tokens, holds for all k of a request is decided by a convex
        function.  Where it does not hold, each of the request's tokens costs the less of the two at
        the least k.
        """
        low, high = self._prompts + 1, self._prompts + self._later

        def anew_s(k: FloatArray) -> FloatArray:
            return price.per_prefill_token_s * k + price.per_pair_s * k * (k + 1) / 2

        def excess_s(k: FloatArray) -> FloatArray:
            return anew_s(k) - price.per_decode_s - price.per_context_s * k

        slope_s = price.per_prefill_token_s + price.per_pair_s / 2 - price.per_context_s
        lowest = -slope_s / price.per_pair_s if price.per_pair_s else math.inf
        turns = np.minimum(np.maximum(low, lowest), np.maximum(low, high))
        fair = (excess_s(low) >= 0) & (excess_s(high) >= 0) & (excess_s(turns) >= 0)
        cheaper_s = np.minimum(anew_s(low), price.per_decode_s + price.per_context_s * low)
        return (
            np.where(fair, price.per_decode_s, cheaper_s),
            np.where(fair, price.per_context_s, 0.0),
        )

    def _prompt_first(self, program: Program, prompt: _Need, tokens: _Need) -> None:
        """Keep the share of later tokens done by each slot's end at or below that of the prompt."""
        last = np.where(self._rest_last >= self._first, self._prompt_last, self._first - 1)
        # In the last slot of the prompt all of it is done, so that slot needs no row.
        rows = _Rows(program, self._first, last - 1)
        rows.cumulate(prompt, -1.0)
        rows.cumulate(tokens, 1.0)

    def _each_token_due(self, program: Program, good: IntArray, tokens: _Need) -> None:
        """Add the due time of every token, which the rule `envelope` has besides the last one's."""
        begin = np.minimum(self._prompt_last + 1, self._rest_last + 1)
        rows = _Rows(program, begin, self._rest_last - 1)
        late_s = self._slot_end_s[rows.slot] - self._first_due_s[rows.owner]
        # Count the tokens that are due before the slot ends; a rounding error counts as not due.
        due = np.floor(late_s / self._tpot_s[rows.owner] - 1e-6)
        later = self._later[rows.owner]
        share = np.clip(due, 0.0, later) / np.maximum(later, 1.0)
        program.add(rows.row, good[rows.owner], share)
        rows.cumulate(tokens, -1.0)


class _Rows:
    """Rows of the program: one for each request and slot of begin … end, for sums up to there."""

    def __init__(self, program: Program, begin: IntArray, end: IntArray) -> None:
        self._program = program
        self._begin, self._end = begin, np.maximum(end, begin - 1)
        self.owner, self.slot = spread(begin, self._end)
        self.row = program.rows(len(self.owner), 0.0)
        counts = self._end - begin + 1
        self._start = np.cumsum(counts) - counts

    def cumulate(self, need: _Need, sign: float) -> None:
        """Add each share to the row of its own slot and of all later slots of its request."""
        from_slot = np.maximum(need.slot, self._begin[need.owner])
        entry, slot = spread(from_slot, self._end[need.owner])
        owner = need.owner[entry]
        row = self.row[self._start[owner] + slot - self._begin[owner]]
        self._program.add(row, need.share[entry], sign)


def _use(program: Program, rows: IntArray, need: _Need, price: float | FloatArray) -> None:
    """Add the shares' amounts, times `price`, to the rows of their slots."""
    values = (need.amount * price)[need.owner]
    program.add(rows[need.slot], need.share, values)
