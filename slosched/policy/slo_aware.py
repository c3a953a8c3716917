"""SLO-aware batching: one order of slack, and the largest batch that meets the tightest SLO."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    EndReason,
    ForeseesDecodes,
    Limits,
    PlansBesideDecodes,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_at_least, check_share
from slosched.policy.kit.make_way import has_to_make_way
from slosched.policy.kit.urgency_queue import UrgencyQueue

_RUNNING = RequestStatus.RUNNING
"""A local name, because each attribute look-up on an enum takes 0.1 µs in Python 3.11."""

_MAX_REFUSED = 32
"""Number of prompts refused for lack of time or KV blocks, after which no more start in a step.

It bounds the cost of a step when a thousand requests wait and none fits.
"""


class LateRule(StrEnum):
    """The requests whose slack may be the time limit of the batch."""

    BIND = "bind"
    """All requests.  If one is late already, nothing fits, and the decodes run nevertheless."""
    EXCLUDE = "exclude"
    """Only requests whose next token can still be in time."""


class EarlyReject(StrEnum):
    """The treatment of a request that would make several others late."""

    ROUND = "round"
    """It does not run in this step; the next step decides anew."""
    FINAL = "final"
    """It is rejected, so that its client can go elsewhere at once."""
    OFF = "off"
    """It runs if it fits."""


@dataclass
class SLOAware(PlansBesideDecodes, ForeseesDecodes):
    """Decode, prefill and swapped requests in one order of slack, packed up to the tightest slack.

    1. Reject the requests without a token whose TTFT deadline has passed.
    2. Sort all others by slack.  The slack of the most urgent that can still be in time is the
       time limit of the batch.
    3. In that order, add a request and predict the batch's time T.  Keep the request if T stays
       below the limit, else leave it out.  Prefills are cut to the largest chunk that fits.
    4. If a decode or a swapped request does not fit, evict the least urgent prefill and pack
       again, until it fits or no prefill is left.  The evicted prefills get chunks in the time
       that is left.
    5. Before a waiting prefill is added, count the less urgent waiting prefills that are in time
       without it and late with it.  If they are `cascade` or more, it is early-rejected.
    6. If nothing can be in time, serve all decodes nevertheless, or else the most urgent prompt.
    7. Best effort, and what is due much later, gives its seats and KV blocks to prompts that lack
       them (kit/make_way.py).  This is ours, too.

    The code reaches the end of steps 3 and 4 without going back, since T grows with every
    addition: it packs decodes and swapped requests in order of slack, then prefills in order of
    slack in the time that remains.  A test compares this with the literal retry.

    Source: the SLO-aware batching of the blog post "vllm reading" (2025-04-01), whose code is not
    public.  `slo_aware_literal` is that algorithm to the letter; here late requests do not bind
    the batch, and an early-rejected request is rejected for good.  Where the post says nothing, the
    readings are the fields below and these.  The slack of a decode is that of the run's
    `DeadlineRule`.  One limit bounds the whole step, not each request's share of it.  When KV
    blocks run out, the least urgent running requests are preempted.  A prompt starts only if all
    of it fits into the cache together with the prompts that have begun.

    A subclass may replace the packing (`new_pack`), and in it the test of step 5 (`cascades`).
    """

    late: LateRule = tunable(LateRule.EXCLUDE, LateRule.BIND)
    expire_begun: bool = True
    """Whether a prompt that has begun is also rejected once its TTFT deadline has passed."""
    cascade: int = tunable(2, 4)
    """Number of other requests made late from which a request is early-rejected."""
    early_reject: EarlyReject = tunable(EarlyReject.FINAL, EarlyReject.ROUND, EarlyReject.OFF)
    max_early_rejects: int = 8
    """Number of early rejections in a step, after which step 5 is left out."""
    min_chunk_tokens: int = 32
    """Smallest size to which a chunk is cut; only the end of a prompt may be smaller."""
    margin: float = tunable(0.0, 0.05, 0.1, 0.2)
    """Share of the time limit that is left unused, in case predictions are too low."""
    cautious: bool = False
    """Whether T is the time that at most 1 % of such steps exceed, not the expected time."""

    makes_way: ClassVar[bool] = True
    """Whether what can wait is preempted for prompts that are due soon."""

    def __post_init__(self) -> None:
        check_at_least(1, cascade=self.cascade, min_chunk_tokens=self.min_chunk_tokens)
        check_at_least(0, max_early_rejects=self.max_early_rejects)
        check_share(margin=self.margin)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        queue = UrgencyQueue(view, view.model, self.expire_begun)
        if self.makes_way:
            queue.make_way()
        limit_s = self._time_limit_s(queue)
        if limit_s <= 0:
            return self._serve_late(queue).batch.build()
        pack = self.new_pack(queue, math.inf)
        pack.add_decodes()
        if (pack.batch.predicted_s or 0.0) >= limit_s:
            pack = self.new_pack(queue, limit_s)
            pack.add_decodes()
        pack.batch.time_limit_s = limit_s
        pack.add_prefills()
        if not pack.batch.num_scheduled_tokens:
            pack = self._serve_late(queue)
        return pack.batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan the prefills as `schedule` does; return None if `decodes` may not all fit.

        That is the case if the first of them is late, too.
        """
        model = view.latency_model
        slack_s = decodes.first_deadline_s - view.now_s
        longest = decodes.max_context_tokens - 1
        if model is None or slack_s <= model.predict_prefill(1, longest):
            return None
        queue = UrgencyQueue(view, model, self.expire_begun)
        limit_s = slack_s * (1 - self.margin)
        prefill_limit_s = self._tightest_s(queue, queue.prefills)
        if prefill_limit_s is not None:
            limit_s = min(limit_s, prefill_limit_s)
        pack = self.new_pack(queue, limit_s, decodes)
        if pack.batch.num_free_tokens < 0 or (pack.batch.predicted_s or 0.0) >= limit_s:
            return None
        if self.makes_way and has_to_make_way(pack.batch, decodes, view, queue.prefills):
            return None
        pack.add_prefills()
        return pack.batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return the first deadline: a step that ends before it is below every decode's slack.

        Deadlines only move away as tokens come out.  With `margin` or `cautious` a step that ends
        before that deadline may still be cut, so that no time is certain.
        """
        if self.margin or self.cautious or decodes.num_decodes > limits.max_num_batched_tokens:
            return -math.inf
        return decodes.first_deadline_s

    def new_pack(
        self, queue: UrgencyQueue, limit_s: float, beside: DecodeGroup | None = None
    ) -> Pack:
        """Return an empty batch for the requests of `queue`, which has to end before `limit_s`."""
        return Pack(self, queue, limit_s, beside)

    def _time_limit_s(self, queue: UrgencyQueue) -> float:
        """Return the tightest slack that may be the limit; zero if there is none."""
        tightest_s = (self._tightest_s(queue, part) for part in (queue.decodes, queue.prefills))
        return min((slack_s for slack_s in tightest_s if slack_s is not None), default=0.0)

    def _tightest_s(self, queue: UrgencyQueue, requests: Sequence[Request]) -> float | None:
        """Return the first slack of `requests`, which are sorted, that may be the limit."""
        for request in requests:
            slack_s = request.deadline_s - queue.view.now_s
            if self.late == LateRule.BIND or slack_s > queue.model.predict_prefill(
                request.num_uncomputed_tokens, request.num_computed_tokens
            ):
                return slack_s * (1 - self.margin)
        return None

    def _serve_late(self, queue: UrgencyQueue) -> Pack:
        """Serve all decodes although nothing can be in time, or else the most urgent prompt."""
        pack = self.new_pack(queue, math.inf)
        pack.add_decodes()
        for request in queue.prefills:
            if pack.batch.num_scheduled_tokens:
                break
            if request.status is _RUNNING:  # its blocks may not suffice for all that is left
                pack.batch.add(request)
            else:
                pack.batch.admit(request)
        return pack


class Pack:
    """One attempt to pack the requests of a queue below a time limit."""

    def __init__(
        self,
        policy: SLOAware,
        queue: UrgencyQueue,
        limit_s: float,
        beside: DecodeGroup | None = None,
    ) -> None:
        self.batch = BatchBuilder(
            queue.view, beside=beside, time_limit_s=limit_s, cautious=policy.cautious
        )
        self._policy = policy
        self._queue = queue
        self._victims = list(queue.running)
        self._promised_blocks = self.batch.blocks_promised(queue.begun)
        self._num_refused = 0
        self._num_early_rejects = 0
        self._predicted_s: float | None = None
        """Predicted time of the batch as it is; None if it has changed since."""
        self._passed_starts_s: list[float] = []
        """Latest starts of the waiting requests looked at so far, which do not count as victims."""
        for request in queue.expired:
            self.batch.reject(request, EndReason.EXPIRED)
        for request in queue.leaving:
            self.batch.preempt(request, PreemptionMode.RECOMPUTE)

    def add_decodes(self) -> None:
        """Add every decode and swapped request that fits; preempt where a decode lacks a block."""
        batch = self.batch
        if not self._queue.view.swapped and batch.time_limit_s == math.inf:
            batch.add_preempting(self._queue.decodes, self._victims)
            return
        for request in self._queue.decodes:
            if request.status is RequestStatus.SWAPPED:
                batch.admit(request, reserved_blocks=self._promised_blocks)
            elif not batch.has_left(request) and batch.make_room(request, 1, self._victims):
                batch.add(request)

    def add_prefills(self) -> None:
        """Add prompts, begun or new, until one has to be cut to the time or tokens left."""
        may_start = self.batch.num_free_seqs > 0
        for request in self._queue.prefills if may_start else self._queue.begun:
            if request.status is _RUNNING:
                if self.batch.has_left(request):
                    continue
                self._promised_blocks -= self.batch.blocks_promised((request,))
            elif not may_start or self.cascades(request):
                continue
            elif not self.batch.fits_whole(request, self._promised_blocks):
                may_start = self._count_refusal()
                continue
            n = self.batch.add(request, min_new_tokens=self._policy.min_chunk_tokens)
            self._predicted_s = None
            if n or request.status is _RUNNING:
                self._promised_blocks += self.batch.blocks_promised((request,))
            if 0 < n < request.num_uncomputed_tokens:
                break
            may_start = may_start and self.batch.num_free_seqs > 0
            if n == 0:
                may_start = may_start and self._count_refusal()

    def _count_refusal(self) -> bool:
        """Count a refused prompt; return False once no more may start in this step."""
        self._num_refused += 1
        return self._num_refused < _MAX_REFUSED

    def cascades(self, request: Request) -> bool:
        """Tell whether to leave `request` out because it would make too many others late.

        Counts the less urgent waiting requests; rejects `request` if the policy says so.
        """
        policy, queue = self._policy, self._queue
        if (
            policy.early_reject == EarlyReject.OFF
            or self._num_early_rejects >= policy.max_early_rejects
            or request.num_output_tokens
        ):
            return False
        if self._predicted_s is None:
            self._predicted_s = self.batch.predicted_s or 0.0
        without_s = self._predicted_s
        with_s = self.batch.predict_with_rest_of(request)
        passed = self._passed_starts_s
        insort(passed, queue.latest_start_s(request))
        victims = queue.count_starts_between(without_s, with_s, self.batch.time_limit_s)
        victims -= bisect_left(passed, with_s) - bisect_left(passed, without_s)
        if victims < policy.cascade:
            return False
        self._num_early_rejects += 1
        if policy.early_reject == EarlyReject.FINAL:
            self.batch.reject(request, EndReason.CASCADE)
        return True
