"""The mission's algorithm: one urgency order, and the largest batch that meets the tightest SLO."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    EndReason,
    ForeseesDecodes,
    LatencyModel,
    Limits,
    PlansBesideDecodes,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_at_least, check_share

_RUNNING, _WAITING = RequestStatus.RUNNING, RequestStatus.WAITING
"""A look at an enum's member takes 0.1 µs in Python 3.11, and a thousand are asked in a step."""

_MAX_REFUSED = 32
"""Prompts refused in one step, for want of time or KV blocks, before no more may start in it.

It bounds the cost of a step when a thousand requests wait and none fits.
"""


class LateRule(StrEnum):
    """Whose slack may be the time limit of the batch."""

    BIND = "bind"
    """Everybody's, also of those already late: then nothing fits, and `progress` decides."""
    EXCLUDE = "exclude"
    """Only of those whose next token can still be in time."""


class EarlyReject(StrEnum):
    """What is done to a request that would make several others late."""

    ROUND = "round"
    """It does not run in this step; it is looked at again in the next."""
    FINAL = "final"
    """It is rejected, so that its client can go elsewhere at once."""
    OFF = "off"


@dataclass
class SLOAware(PlansBesideDecodes, ForeseesDecodes):
    """Decode, prefill and swapped requests in one order of slack, packed up to the tightest slack.

    1. Reject the requests without a token whose TTFT deadline has passed.
    2. Sort all others by slack.  The slack of the most urgent is the time limit of the batch.
    3. In that order: add a request, predict the batch, keep it if T < limit, else leave it out.
       Prefills are cut to the largest chunk that fits.
    4. If a decode or a swapped request does not fit, evict the least urgent prefill and pack
       again, until it fits or no prefill is left; the evicted get a chunk of what time is left.
    5. Before a waiting prefill is added: if running it would make `cascade` or more of the less
       urgent waiting prefills late that are not late otherwise, it is early-rejected.

    Steps 3 and 4 end in a state that can be reached without going back, since every addition only
    makes T grow: decodes and swapped requests are packed first, in order of slack, then prefills
    in order of slack in the time that remains.  A test holds this against the literal retry.

    Source: the mission's text (blog post "vllm reading", 2025-04-01), whose code is not public.
    Where it is silent, the readings are the fields below and these: the slack of a decode is that
    of the run's `DeadlineRule`; one limit bounds the whole step, not each request's share of it;
    when KV blocks run out the least urgent running requests are preempted, and a prompt starts
    only if all of it fits beside those already begun.
    """

    late: LateRule = LateRule.EXCLUDE
    expire_begun: bool = True
    """Whether a prompt that has begun is rejected, too, once its TTFT deadline has passed."""
    cascade: int = tunable(2, 4)
    """What "several" timeouts are."""
    early_reject: EarlyReject = tunable(EarlyReject.FINAL, EarlyReject.ROUND, EarlyReject.OFF)
    max_early_rejects: int = 8
    """Early rejections in one step; after them prefills are added without asking."""
    min_chunk_tokens: int = 32
    """No chunk is cut smaller than this, unless it is the end of its prompt."""
    margin: float = tunable(0.0, 0.05, 0.1, 0.2)
    """Share of the time limit that is left unused, against predictions that are too low."""
    cautious: bool = False
    """Whether the time that at most 1 % of such steps exceed must stay below the limit."""

    def __post_init__(self) -> None:
        check_at_least(1, cascade=self.cascade, min_chunk_tokens=self.min_chunk_tokens)
        check_at_least(0, max_early_rejects=self.max_early_rejects)
        check_share(margin=self.margin)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        queue = _Queue(view, view.model, self.expire_begun)
        limit_s = self._time_limit_s(queue)
        if limit_s <= 0:
            return self._serve_late(queue).batch.build()
        pack = _Pack(self, queue, math.inf)
        pack.add_decodes()
        if (pack.batch.predicted_s or 0.0) >= limit_s:
            pack = _Pack(self, queue, limit_s)
            pack.add_decodes()
        pack.batch.time_limit_s = limit_s
        pack.add_prefills()
        if not pack.batch.num_scheduled_tokens:
            pack = self._serve_late(queue)
        return pack.batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Unless the first decode is late, or they do not fit below the limit."""
        model = view.latency_model
        slack_s = decodes.first_deadline_s - view.now_s
        longest = decodes.max_context_tokens - 1
        if model is None or slack_s <= model.predict_prefill(1, longest):
            return None
        queue = _Queue(view, model, self.expire_begun)
        limit_s = slack_s * (1 - self.margin)
        prefill_limit_s = self._tightest_s(queue, queue.prefills)
        if prefill_limit_s is not None:
            limit_s = min(limit_s, prefill_limit_s)
        pack = _Pack(self, queue, limit_s, decodes)
        if pack.batch.num_free_tokens < 0 or (pack.batch.predicted_s or 0.0) >= limit_s:
            return None
        pack.add_prefills()
        return pack.batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """The first deadline: a step that ends before it is below every decode's slack.

        Deadlines only move away as tokens come out.  With a margin, or cautious, a step that ends
        before it may still be cut: then nothing is certain.
        """
        if self.margin or self.cautious or decodes.num_decodes > limits.max_num_batched_tokens:
            return -math.inf
        return decodes.first_deadline_s

    def _time_limit_s(self, queue: _Queue) -> float:
        """Step 2: the tightest slack; zero if nobody's may be the limit."""
        tightest_s = (self._tightest_s(queue, part) for part in (queue.decodes, queue.prefills))
        return min((slack_s for slack_s in tightest_s if slack_s is not None), default=0.0)

    def _tightest_s(self, queue: _Queue, requests: Sequence[Request]) -> float | None:
        for request in requests:
            slack_s = request.deadline_s - queue.view.now_s
            if self.late == LateRule.BIND or slack_s > queue.model.predict_prefill(
                request.num_uncomputed_tokens, request.num_computed_tokens
            ):
                return slack_s * (1 - self.margin)
        return None

    def _serve_late(self, queue: _Queue) -> _Pack:
        """Nothing can be in time: serve all decodes all the same, or else the most urgent."""
        pack = _Pack(self, queue, math.inf)
        pack.add_decodes()
        for request in queue.prefills:
            if pack.batch.num_scheduled_tokens:
                break
            pack.batch.admit(request)
        return pack


class _Queue:
    """All requests of a step in order of urgency, and what a cascade would do to them."""

    def __init__(self, view: SchedulerView, model: LatencyModel, expire_begun: bool) -> None:
        self.view = view
        self.model = model
        by_slack = attrgetter("deadline_s")
        self.running = sorted(view.running, key=by_slack)
        self.begun = [r for r in self.running if not r.is_decode]
        decodes = [r for r in self.running if r.is_decode] if self.begun else self.running
        self.decodes = sorted((*decodes, *view.swapped), key=by_slack) if view.swapped else decodes
        """Decodes and swapped requests."""
        self.prefills = sorted((*self.begun, *view.waiting), key=by_slack)
        """Prompts begun and waiting, without those that are rejected as expired."""
        self.expired = self._take_expired(expire_begun)
        self._latest_starts_s: list[float] | None = None

    def _take_expired(self, expire_begun: bool) -> list[Request]:
        expired = []
        for request in self.prefills:
            if request.deadline_s >= self.view.now_s:
                break
            may_expire = expire_begun or request.status is RequestStatus.WAITING
            if may_expire and request.num_output_tokens == 0:
                expired.append(request)
        if expired:
            gone = {r.request_id for r in expired}
            self.prefills, self.begun, self.running = (
                [r for r in requests if r.request_id not in gone]
                for requests in (self.prefills, self.begun, self.running)
            )
        return expired

    def latest_start_s(self, request: Request) -> float:
        """How long from now its prefill can wait and still meet the deadline."""
        prefill_s = self.model.predict_prefill(request.num_uncomputed_tokens)
        return request.deadline_s - self.view.now_s - prefill_s

    def count_starts_between(self, begin_s: float, end_s: float, limit_s: float) -> int:
        """Waiting requests that are in time if they start at `begin_s`, but not at `end_s`.

        `limit_s` bounds every `begin_s` of the step.
        """
        if self._latest_starts_s is None:
            self._latest_starts_s = self._find_latest_starts(limit_s)
        starts = self._latest_starts_s
        return bisect_left(starts, end_s) - bisect_left(starts, begin_s)

    def _find_latest_starts(self, limit_s: float) -> list[float]:
        """Sorted, of all that a prefill begun before `limit_s` could make late.

        Nobody due later than the longest prefill, and its own after it, is among them, which
        spares most of a long queue.
        """
        predict, now_s, waiting = self.model.predict_prefill, self.view.now_s, self.view.waiting
        longest_s = predict(max(r.num_prompt_tokens + r.num_output_tokens for r in waiting))
        due_s = now_s + limit_s + 2 * longest_s
        num_due = bisect_right(self.prefills, due_s, key=attrgetter("deadline_s"))
        unsorted = [
            r.deadline_s - now_s - predict(r.num_prompt_tokens + r.num_output_tokens)
            for r in self.prefills[:num_due]
            if r.status is _WAITING
        ]
        return sorted(unsorted)


class _Pack:
    """One attempt at packing the queue below a time limit."""

    def __init__(
        self,
        policy: SLOAware,
        queue: _Queue,
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
        """Of the batch as it is; None when it has to be asked again."""
        self._passed_starts_s: list[float] = []
        """Latest starts of the waiting requests asked so far: they are not behind the next."""
        for request in queue.expired:
            self.batch.reject(request, EndReason.EXPIRED)

    def add_decodes(self) -> None:
        """Add every decode and swapped request that fits; a decode may preempt for its block."""
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
        """Add prompts, begun or new, until one had to be cut to the time or tokens left."""
        may_start = self.batch.num_free_seqs > 0
        for request in self._queue.prefills if may_start else self._queue.begun:
            if request.status is _RUNNING:
                if self.batch.has_left(request):
                    continue
                self._promised_blocks -= self.batch.blocks_promised((request,))
            elif not may_start or self._cascades(request):
                continue
            elif not self.batch.fits_whole(request, self._promised_blocks):
                may_start = self._count_refusal()
                continue
            n = self.batch.add(request, min_new_tokens=self._policy.min_chunk_tokens)
            self._predicted_s = None
            self._promised_blocks += self.batch.blocks_promised((request,))
            if 0 < n < request.num_uncomputed_tokens:
                break
            may_start = may_start and self.batch.num_free_seqs > 0
            if n == 0:
                may_start = may_start and self._count_refusal()

    def _count_refusal(self) -> bool:
        """False once so many were refused that no more are asked."""
        self._num_refused += 1
        return self._num_refused < _MAX_REFUSED

    def _cascades(self, request: Request) -> bool:
        """Step 5: count the less urgent waiting requests that this one would make late."""
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
