"""SlideBatching (ProServe): by deadline while all can be met, by density in overload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from slosched.batch import BatchBuilder
from slosched.core import (
    BatchShape,
    DecodeGroup,
    LatencyModel,
    PlansBesideDecodes,
    Request,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_at_least, check_share
from slosched.policy.kit.deadlines import Deadlines
from slosched.policy.kit.deferred import all_in_time, are_alone, num_in_time, serve_something
from slosched.policy.kit.drop import Drop, drop_late

_Floats = npt.NDArray[np.float64]


@dataclass
class SlideBatching(PlansBesideDecodes):
    """One queue of decodes and prompts; the line between urgent and normal slides with the load.

    1. e(r) is the time that the rest of r would take now, without the constant c0 of a step.
    2. The time limit of the step is the smallest time left over the requests that can still be in
       time (those with at least e(r) + c0 left), and at least `floor` · the smallest TPOT.
    3. In steps of this length the whole queue takes Φ = Σe · step / (step - c0).  A request with
       less than `alpha` · Φ left is urgent: none with a short queue, all in overload.
    4. The order is urgent decodes, urgent prompts, then all others.  Urgent requests are sorted by
       density 1 / e(r), the cheapest first, but among prompts those overdue by `starved_after`
       TTFTs come first.  The others are sorted by deadline.
    5. Requests are added in this order until one does not fit into the time limit.  Prompts are cut
       to fit, but not below `min_chunk_tokens`.  Requests that do not fit wait, decodes included.

    Source: ProServe (arXiv 2512.12928) and its code in jd-opensource/xllm at 87e8d6e:
    `mix_scheduler.cpp` (there `lambda` is alpha, 0.65 the floor, 50 tokens the smallest cut),
    `priority_comparator.cpp`, `time_predictor.cpp`.  At 1054bac, the version
    read for this file, urgent requests go by density alone (decodes are the cheapest anyway), and
    starved requests are marked but the mark is not used.

    Differences: the run's latency model predicts.  Its step of one token stands for c0, and a
    decode's e(r) is its share, by context, of the time of all decodes together.  Waiting prompts
    do not evict running requests (decodes do, from the end of the order), so that requests do not
    evict each other in turns.  Where the code would run nothing, running requests are served all
    the same.  Left out: weights of tenants, layer by layer reloading, and the router above the
    replicas.  ProServe has no `margin` and no `drop`; they are here so that all policies can be
    compared with the same options.

    The policy uses no output lengths.
    """

    alpha: float = tunable(1.0, 0.8, 0.5)
    """Share of the time for the whole queue below which a request is urgent."""
    floor: float = tunable(0.65, 1.0)
    """Share of the smallest TPOT that a step may always last."""
    starved_after: float = 1.0
    """Number of TTFTs by which a prompt has to be overdue to go before cheaper ones."""
    min_chunk_tokens: int = 51
    """Smallest number of tokens to which a prompt is cut."""
    deadlines: Deadlines = tunable(Deadlines.ENVELOPE, Deadlines.RUN)
    margin: float = tunable(0.0, 0.05, 0.1, 0.2)
    """Share of the step's time that is left unused, against predictions that are too low."""
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_at_least(0, alpha=self.alpha, floor=self.floor, starved_after=self.starved_after)
        check_at_least(1, min_chunk_tokens=self.min_chunk_tokens)
        check_share(margin=self.margin)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view)
        view = drop_late(batch, view, self.drop)
        queue = _Queue(view, view.model, self.deadlines)
        if queue.requests:
            step_s = queue.step_s(self.floor)
            order = self._in_order(queue, self.alpha * queue.time_for_all_s(step_s))
            batch.time_limit_s = (1 - self.margin) * step_s
            _Pack(batch, queue, order, self.min_chunk_tokens).fill()
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan nothing else if there are only decodes and they take less than a step always may."""
        limit_s = (1 - self.margin) * (self.floor * min(decodes.num_by_tpot_s))
        if not (are_alone(decodes, view) and all_in_time(decodes, view, limit_s)):
            return None
        return SchedulerOutput()

    def _in_order(self, queue: _Queue, urgent_below_s: float) -> npt.NDArray[np.intp]:
        """Return the places in the queue in the order in which they are served."""
        left_s = queue.left_s
        is_starved = np.zeros(len(left_s), dtype=bool)
        overdue = np.flatnonzero(left_s[queue.num_decodes :] < 0) + queue.num_decodes
        for i in overdue.tolist():
            is_starved[i] = left_s[i] < -self.starved_after * queue.requests[i].slo.ttft_s
        is_decode = np.arange(len(left_s)) < queue.num_decodes
        is_urgent = left_s < urgent_below_s
        group = np.where(is_urgent, np.where(is_decode, 0, np.where(is_starved, 1, 2)), 3)
        group = group.astype(np.int8)  # sorted in one pass
        return np.lexsort((np.where(is_urgent, queue.cost_s, left_s), group))


class _Queue:
    """All requests: running decodes, prompts that have begun, swapped and waiting requests."""

    def __init__(self, view: SchedulerView, model: LatencyModel, deadlines: Deadlines) -> None:
        begun = [  # `not r.is_decode`, written out
            r
            for r in view.running
            if r.num_prompt_tokens + r.num_output_tokens - r.num_computed_tokens != 1
        ]
        decodes = [r for r in view.running if r.is_decode] if begun else view.running
        self.requests = [*decodes, *begun, *view.swapped, *view.waiting]
        self.num_decodes = len(decodes)
        self.num_running = len(view.running)
        self.constant_s = model.predict_prefill(1)
        """c0."""
        self.left_s = _array(deadlines.due_s(self.requests)) - view.now_s
        """Time left until each request is due."""
        costs_s = _array(self._seconds(model)) - self.constant_s
        self.cost_s = np.concatenate((self._decode_costs_s(decodes, model), costs_s))
        """e(r) of each request."""

    def _decode_costs_s(self, decodes: Sequence[Request], model: LatencyModel) -> _Floats:
        """Return e(r) of the decodes: the time of all of them, shared out by context."""
        contexts = [r.num_computed_tokens + 1 for r in decodes]
        if not contexts:
            return _array(())
        shape = BatchShape()
        shape.add_decodes(contexts)
        together_s = max(0.0, model.predict(shape) - self.constant_s)
        return _array(contexts) * (together_s / shape.decode_context_tokens)

    def _seconds(self, model: LatencyModel) -> list[float]:
        """Return the time of a step with the rest of each request that is no decode."""
        predict = model.predict_prefill
        prompts = self.requests[self.num_decodes :]
        return [predict(r.num_uncomputed_tokens, r.num_computed_tokens) for r in prompts]

    def step_s(self, floor: float) -> float:
        """Return how long the step may last."""
        in_time = self.left_s >= self.cost_s + self.constant_s
        soonest_s = float(self.left_s.min(initial=math.inf, where=in_time))
        tpot_s = min([r.slo.tpot_s for r in self.requests])
        return max(soonest_s, floor * tpot_s)

    def time_for_all_s(self, step_s: float) -> float:
        """Return Φ, the seconds to clear the queue in steps of this length."""
        total_s = float(self.cost_s.sum())
        if step_s == math.inf:
            return total_s
        if step_s <= self.constant_s:
            return math.inf
        return total_s * step_s / (step_s - self.constant_s)


def _array(values: Sequence[float]) -> _Floats:
    """Return an array of floats, in two thirds of the time of `np.array`."""
    return np.fromiter(values, np.float64, len(values))


class _Pack:
    """Fills a step in the order of a queue."""

    def __init__(
        self, batch: BatchBuilder, queue: _Queue, order: npt.NDArray[np.intp], min_chunk_tokens: int
    ) -> None:
        self._batch = batch
        self._queue = queue
        self._order = order
        self._min_chunk_tokens = min_chunk_tokens
        self._running = [queue.requests[i] for i in order[order < queue.num_running].tolist()]
        self._victims = list(self._running)
        begun = queue.requests[queue.num_decodes : queue.num_running]
        self._promised_blocks = batch.blocks_promised(begun)
        self._may_start = True

    def fill(self) -> None:
        """Add requests until time or tokens are used up."""
        requests, is_decode = self._queue.requests, self._order < self._queue.num_decodes
        runs = [0, *(np.flatnonzero(np.diff(is_decode)) + 1).tolist(), len(is_decode)]
        for begin, end in pairwise(runs):
            places = self._order[begin:end].tolist()
            if is_decode[begin]:
                goes_on = self._add_decodes([requests[i] for i in places])
            else:
                goes_on = all(self._add_prompt(i) for i in places)
            if not goes_on:
                break
        if not self._batch.num_scheduled_tokens:
            others = (requests[i] for i in self._order.tolist() if i >= self._queue.num_running)
            serve_something(self._batch, self._running, others)

    def _add_decodes(self, decodes: list[Request]) -> bool:
        """Add decodes; return False if time or tokens are too few for one of them."""
        batch = self._batch
        if batch.preempted or batch.swapped_out:
            decodes = [r for r in decodes if not batch.has_left(r)]
        num_served = num_in_time(batch, decodes)
        batch.add_preempting(decodes[:num_served], self._victims)
        return num_served == len(decodes)

    def _add_prompt(self, place: int) -> bool:
        """Add a prompt; return False if no time or no token is left for it."""
        batch, request = self._batch, self._queue.requests[place]
        if place < self._queue.num_running:
            if batch.has_left(request):
                return True
            self._promised_blocks -= batch.blocks_promised((request,))
        elif not self._has_room(request):
            return True
        n = batch.add(request, min_new_tokens=self._min_chunk_tokens)
        if n or place < self._queue.num_running:
            self._promised_blocks += batch.blocks_promised((request,))
        return n > 0 or batch.largest_chunk(request, self._min_chunk_tokens) > 0

    def _has_room(self, request: Request) -> bool:
        """Tell whether the prompt may start; the first that may not keeps later ones out, too."""
        batch = self._batch
        self._may_start = (
            self._may_start
            and batch.num_free_seqs > 0
            and not (batch.preempted or batch.swapped_out)
            and batch.fits_whole(request, self._promised_blocks)
        )
        return self._may_start
