"""The mission's algorithm: one urgency order, and the largest batch that meets the tightest SLO."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import (
    EndReason,
    LatencyModel,
    Policy,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
)

_MAX_REFUSED = 64
"""Waiting requests refused in one step, for KV blocks or as cascades, before the rest is not asked.

It bounds the cost of a step when a thousand requests wait and none may start.
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
class SLOAware(Policy):
    """Decode, prefill and swapped requests in one order of slack, packed up to the tightest slack.

    1. Reject the waiting requests whose TTFT deadline has passed.
    2. Sort all others by slack.  The slack of the most urgent is the time limit of the batch.
    3. In that order: add a request, predict the batch, keep it if T < limit, else leave it out.
       Prefills are cut to the largest chunk that fits.
    4. If a decode or a swapped request does not fit, evict the least urgent prefills (one, then
       two, four, …) and pack again, until it fits or no prefill is left; then offer the evicted
       ones what time is left over.
    5. Before a waiting prefill is added: if running it would make `cascade` or more of the less
       urgent prefills late that are not late otherwise, it is early-rejected.

    Source: the mission's text (blog post "vllm reading", 2025-04-01), whose code is not public.
    Where it is silent, the readings are the fields below and these: the slack of a decode is that
    of the run's `DeadlineRule`; one limit bounds the whole step, not each request's share of it;
    when KV blocks run out the least urgent running requests are preempted, and a prompt starts
    only if all of it fits beside those already begun; the eviction doubles so that packing is
    O(n log n) and not quadratic.
    """

    late: LateRule = LateRule.EXCLUDE
    cascade: int = 2
    """What "several" timeouts are."""
    early_reject: EarlyReject = EarlyReject.FINAL
    min_chunk_tokens: int = 32
    """No chunk is cut smaller than this, unless it is the end of its prompt."""
    margin: float = 0.0
    """Share of the time limit that is left unused, against predictions that are too low."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        model = view.latency_model
        if model is None:
            raise ValueError("slo_aware predicts every batch: give the scheduler a latency model")
        queue = _Queue(view, model)
        limit_s = self._time_limit_s(queue.order, view.now_s, model)
        pack = self._pack_evicting(queue, limit_s)
        if queue.order and not pack.batch.num_scheduled_tokens:
            pack = self._serve_late(queue)
        return pack.batch.build()

    def _time_limit_s(self, order: Sequence[Request], now_s: float, model: LatencyModel) -> float:
        """Step 2: the tightest slack; zero if nobody's may be the limit."""
        for request in order:
            slack_s = request.deadline_s - now_s
            if self.late == LateRule.BIND or slack_s > model.predict_prefill(
                request.num_uncomputed_tokens, request.num_computed_tokens
            ):
                return slack_s * (1 - self.margin)
        return 0.0

    def _pack_evicting(self, queue: _Queue, limit_s: float) -> _Pack:
        """Steps 3 and 4: pack, and while a decode is refused, evict prefills and pack again."""
        evicted: set[str] = set()
        num_to_evict = 1
        while True:
            pack = _Pack(self, queue, limit_s)
            if limit_s <= 0 or pack.add_all(evicted):
                return pack
            evicted.update(r.request_id for r in pack.prefills[-num_to_evict:])
            num_to_evict *= 2

    def _serve_late(self, queue: _Queue) -> _Pack:
        """Nothing can be in time: serve all decodes all the same, or else the most urgent."""
        pack = _Pack(self, queue, math.inf)
        for request in queue.order:
            if not is_prefill(request):
                pack.add_decode(request)
        for request in queue.order:
            if pack.batch.num_scheduled_tokens:
                break
            pack.batch.admit(request)
        return pack


def is_prefill(request: Request) -> bool:
    """True if the request waits for its first token or must be recomputed; swapped ones do not."""
    return request.status is RequestStatus.WAITING or (
        request.status is RequestStatus.RUNNING and not request.is_decode
    )


class _Queue:
    """All requests of a step in order of urgency, and what a cascade would do to them."""

    def __init__(self, view: SchedulerView, model: LatencyModel) -> None:
        self.view = view
        self.expired = [
            r for r in view.waiting if r.deadline_s < view.now_s and r.num_output_tokens == 0
        ]
        gone = {r.request_id for r in self.expired}
        waiting = [r for r in view.waiting if r.request_id not in gone] if gone else view.waiting
        self.order = sorted(
            (*view.running, *view.swapped, *waiting), key=attrgetter("deadline_s", "arrival_s")
        )
        self.running = [r for r in self.order if r.status is RequestStatus.RUNNING]
        self._model = model
        self._waiting = waiting
        self._latest_starts_s: list[float] | None = None

    def latest_start_s(self, request: Request) -> float:
        """How long from now its remaining prefill can wait and still meet the deadline."""
        return (
            request.deadline_s
            - self.view.now_s
            - self._model.predict_prefill(request.num_uncomputed_tokens)
        )

    def count_starts_between(self, begin_s: float, end_s: float) -> int:
        """Waiting requests that are in time if they start at `begin_s`, but not at `end_s`."""
        if self._latest_starts_s is None:
            self._latest_starts_s = sorted(self.latest_start_s(r) for r in self._waiting)
        starts = self._latest_starts_s
        return bisect_left(starts, end_s) - bisect_left(starts, begin_s)


class _Pack:
    """One attempt at packing the queue below a time limit."""

    def __init__(self, policy: SLOAware, queue: _Queue, limit_s: float) -> None:
        self.batch = BatchBuilder(queue.view, time_limit_s=limit_s)
        self.prefills: list[Request] = []
        """Those added, the most urgent first."""
        self._policy = policy
        self._queue = queue
        self._victims = list(queue.running)
        self._promised_blocks = self.batch.blocks_promised(queue.running)
        self._is_full = False
        """No time is left for one more prefill."""
        self._num_refused = 0
        self._passed_starts_s: list[float] = []
        """Latest starts of the waiting requests asked so far: they are not behind the next."""
        for request in queue.expired:
            self.batch.reject(request, EndReason.EXPIRED)

    def add_all(self, evicted: set[str]) -> bool:
        """Step 3; False as soon as a decode is refused for time that prefills have taken."""
        for request in self._queue.order:
            if not is_prefill(request):
                if not self.add_decode(request) and self.prefills:
                    return False
            elif request.request_id not in evicted:
                self.add_prefill(request)
        for request in self._queue.order if evicted else ():
            if request.request_id in evicted:
                self.add_prefill(request)
        return True

    def add_decode(self, request: Request) -> bool:
        """Add a decode or a swapped request; False if its time does not fit."""
        batch = self.batch
        if request.status is RequestStatus.SWAPPED:
            if batch.num_free_seqs <= 0 or not batch.fits_whole(request, self._promised_blocks):
                return True
        elif batch.has_left(request) or not batch.make_room(request, 1, self._victims):
            return True
        return batch.add(request) > 0 or batch.num_free_tokens <= 0

    def add_prefill(self, request: Request) -> None:
        """Add a chunk of a prompt, begun or new, if there is time and memory for it."""
        if self._is_full:
            return
        if request.status is RequestStatus.RUNNING:
            self._promised_blocks -= self.batch.blocks_promised((request,))
        elif not self._may_start(request):
            return
        n = self.batch.add(request, min_new_tokens=self._policy.min_chunk_tokens)
        self._promised_blocks += self.batch.blocks_promised((request,))
        self._is_full = n < request.num_uncomputed_tokens
        if n:
            self.prefills.append(request)

    def _may_start(self, request: Request) -> bool:
        if self.batch.num_free_seqs <= 0 or self._num_refused >= _MAX_REFUSED:
            return False
        if self.batch.fits_whole(request, self._promised_blocks) and not self._cascades(request):
            return True
        self._num_refused += 1
        return False

    def _cascades(self, request: Request) -> bool:
        """Step 5: count the less urgent waiting requests that this one would make late."""
        policy, queue = self._policy, self._queue
        if policy.early_reject == EarlyReject.OFF or request.num_output_tokens:
            return False
        without_s = self.batch.predicted_s or 0.0
        with_s = self.batch.predict_with_rest_of(request)
        insort(self._passed_starts_s, queue.latest_start_s(request))
        passed = self._passed_starts_s
        victims = queue.count_starts_between(without_s, with_s)
        victims -= bisect_left(passed, with_s) - bisect_left(passed, without_s)
        if victims < policy.cascade:
            return False
        if policy.early_reject == EarlyReject.FINAL:
            self.batch.reject(request, EndReason.CASCADE)
        return True
