"""vLLM's current scheduler, V1: running requests go on in order, waiting ones fill the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    ForeseesDecodes,
    Limits,
    PlansBesideDecodes,
    Request,
    SchedulerOutput,
    SchedulerView,
    heeding,
    tunable,
)
from slosched.policy.engines.vllm_v0.policy import SchedulingPolicy
from slosched.policy.engines.vllm_v1.admission import (
    add_begun_beside,
    add_running_choosing,
    admit,
    by_urgency,
    in_order,
)
from slosched.policy.kit.decode_first import decodes_until_s, may_start_new


@dataclass
class VLLMV1(PlansBesideDecodes, ForeseesDecodes):
    """vLLM 0.33's V1 scheduler, decision by decision, with the names and defaults of its options.

    Running requests come first, in order of admission, each with all its tokens or what is left of
    the step's.  When KV blocks run out, the youngest running request is preempted.  With
    `priority`, it is the one with the largest number (then the latest arrival), even if it already
    has its part in this step.  Waiting requests start only if no request was preempted, in order of
    arrival or of priority, until one does not fit.  Priority never takes a seat from a running
    request.

    Tokens, seats and LoRA adapters are the host's `Limits`.  Source: vLLM 0.32 and 0.33
    `v1/core/sched/scheduler.py`, `v1/core/kv_cache_manager.py`.  Its asynchronous scheduling is the
    engine's (`engine/overlap.py`).  Left out: speculation, encoders, KV connectors, structured
    output, streaming sessions, the limits on queued requests (they are the API server's), and
    `max_num_partial_prefills`, which V1 has refused and 0.33 dropped.  Differences:

    * Without `enable_chunked_prefill`, vLLM requires that a step hold the longest prompt.  Here a
      longer one starts when it has a step for itself, and is computed in parts.
    * Requests that were swapped out, by the host's `preemption_mode` or by another policy, come
      back before new ones start; V1 has no swap.
    * Among requests of equal priority that arrived at the same instant, the first in the queue goes
      first; in vLLM, the one with the first name does.
    * In vLLM, `prefill_schedule_interval` applies only to the engines of a data-parallel
      deployment, by a step count that they share.  Here steps are counted from when no request ran.

    A subclass may serve the waiting in another order (`waiting_in_order`), or running requests in
    another way (`add_running`, and `add_running_beside` for the same beside a group of decodes).
    """

    policy: SchedulingPolicy = heeding(
        SchedulingPolicy.FCFS, {SchedulingPolicy.PRIORITY: "priority"}
    )
    """With `priority`, lower numbers, then earlier arrivals, run first and are preempted last."""
    long_prefill_token_threshold: int = tunable(0, 256, 512, 1024)
    """The largest chunk of a prompt, unless the request is alone; 0 for no such limit."""
    long_prefill_token_threshold_adaptive: bool = False
    """True if the largest chunk is never less than an equal share of the step's tokens."""
    enable_chunked_prefill: bool = True
    scheduler_reserve_full_isl: bool = True
    """True if a prompt starts only when all of it fits into the free KV blocks."""
    watermark: float = tunable(0.0, 0.01, 0.05)
    """The share of the KV blocks that starting a request leaves free, unless no request runs."""
    max_num_active_seqs: int = 0
    """The number of requests that run at once, if fewer than there are seats; 0 for all seats."""
    prefill_schedule_interval: int = 1
    """While decodes run, prompts are computed only in every n-th step, unless the last such step
    could not let all waiting requests start."""

    def __post_init__(self) -> None:
        for name in ("long_prefill_token_threshold", "max_num_active_seqs"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")
        if self.prefill_schedule_interval < 1:
            raise ValueError(
                f"prefill_schedule_interval must be at least 1, not "
                f"{self.prefill_schedule_interval}"
            )
        self.reset()

    def reset(self) -> None:
        self._num_steps = 0
        """Steps since no request ran."""
        self._is_capacity_bound = False
        """True if the last step that let prompts start left some waiting, not for LoRA slots."""
        self._passed_over: set[str] = set()
        """Waiting requests that found no LoRA slot when they were looked at."""
        self._begun: set[str] = set()
        """Requests whose latest chunk was not their last, kept if prompts wait for their turn."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        view = self._with_active_seats(view)
        batch = BatchBuilder(view)
        most_tokens = self._longest_chunk(view, num_decodes=0)
        defers = self._defers_prefills(view)
        running = [r for r in view.running if not self._is_prefill(r)] if defers else view.running
        self.add_running(batch, view, running, most_tokens)
        if may_start_new(batch, view, begun=[]):
            self._admit(batch, view, most_tokens, defers=defers)
        if self.prefill_schedule_interval > 1:
            self._note_begun(batch, view)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Return a plan if none has to be preempted and steps need not be counted, else None."""
        view = self._with_active_seats(view)
        batch = BatchBuilder(view, beside=decodes)
        most_tokens = self._longest_chunk(view, decodes.num_decodes)
        if self.prefill_schedule_interval > 1 or not self.add_running_beside(
            batch, decodes, view, most_tokens
        ):
            return None
        self._admit(batch, view, most_tokens, defers=False)
        return batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        if self.prefill_schedule_interval > 1:
            return -math.inf
        return decodes_until_s(decodes, limits, limits.max_num_batched_tokens)

    def add_running(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        running: Sequence[Request],
        most_tokens: int | None,
    ) -> None:
        """Add running requests in order, in chunks of `most_tokens`; preempt where blocks run out.

        `running` are those of `view.running` whose turn is in this step.
        """
        if self.policy is SchedulingPolicy.PRIORITY:
            add_running_choosing(batch, view, running, by_urgency, most_tokens)
        else:
            batch.add_preempting(running, list(view.running), most_tokens)

    def add_running_beside(
        self,
        batch: BatchBuilder,
        decodes: DecodeGroup,
        view: SchedulerView,
        most_tokens: int | None,
    ) -> bool:
        """Do the same beside `decodes`; return False if this takes a look at each of them."""
        return add_begun_beside(batch, decodes, view.running, most_tokens)

    def waiting_in_order(self, view: SchedulerView) -> Iterable[Request]:
        """Return the waiting requests in the order in which they start."""
        if self.policy is SchedulingPolicy.PRIORITY:
            return in_order(view.waiting, by_urgency)
        return view.waiting

    def _with_active_seats(self, view: SchedulerView) -> SchedulerView:
        limits = view.limits
        if not 0 < self.max_num_active_seqs < limits.max_num_seqs:
            return view
        return replace(view, limits=replace(limits, max_num_seqs=self.max_num_active_seqs))

    def _longest_chunk(self, view: SchedulerView, num_decodes: int) -> int | None:
        """Return the largest chunk in tokens, or None for no limit.

        `num_decodes` run in addition to the requests in view.
        """
        threshold, limit = self.long_prefill_token_threshold, view.limits.max_chunk_tokens
        num_requests = len(view.running) + len(view.waiting) + num_decodes
        if not threshold or num_requests <= 1:
            return limit
        if self.long_prefill_token_threshold_adaptive:
            threshold = max(threshold, view.limits.max_num_batched_tokens // num_requests)
        return threshold if limit is None else min(threshold, limit)

    def _admit(
        self, batch: BatchBuilder, view: SchedulerView, most_tokens: int | None, *, defers: bool
    ) -> None:
        waiting = self.waiting_in_order(view)
        if defers:
            waiting = _decodes_at_the_head(waiting)
        passed_over = admit(
            batch,
            view,
            waiting,
            max_chunk_tokens=most_tokens,
            may_chunk=self.enable_chunked_prefill,
            must_fit_whole=self.scheduler_reserve_full_isl,
            # vLLM's count includes its null block, which holds nothing
            num_watermark_blocks=int(self.watermark * (view.kv.num_blocks + 1)),
        )
        if self.prefill_schedule_interval > 1:
            self._passed_over.update(passed_over)
            left = {r.request_id for r in view.waiting if r not in batch}
            self._passed_over &= left
            if not defers:
                self._is_capacity_bound = len(left) > len(self._passed_over)

    def _defers_prefills(self, view: SchedulerView) -> bool:
        if not view.running:
            self._num_steps = 0
        is_their_turn = self._num_steps % self.prefill_schedule_interval == 0
        self._num_steps += 1
        if is_their_turn or self._is_capacity_bound:
            return False
        return not all(map(self._is_prefill, view.running))

    def _is_prefill(self, request: Request) -> bool:
        """Tell whether the request is in prefill; its last chunk may be one token, as a decode."""
        return not request.is_decode or request.request_id in self._begun

    def _note_begun(self, batch: BatchBuilder, view: SchedulerView) -> None:
        granted = batch.num_scheduled_tokens
        waits = {r.request_id for r in view.running if r not in batch and not batch.has_left(r)}
        self._begun &= waits
        for request in chain(view.running, view.waiting):
            left = request.num_uncomputed_tokens
            if granted.get(request.request_id, left) < left:
                self._begun.add(request.request_id)


def _decodes_at_the_head(waiting: Iterable[Request]) -> Iterable[Request]:
    """Yield requests with all but one token cached, up to the first that has more left."""
    for request in waiting:
        if request.num_uncomputed_tokens > 1:
            return
        yield request
