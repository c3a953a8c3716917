"""Decodes that are far ahead of their deadlines lend their KV blocks to prompts that are due soon.

A decode that runs at 10 of the 50 ms that its TPOT allows needs its blocks a fifth of the time
only.  In the rest it may be preempted, and computed anew before its next token is due.  So a cache
that is too small for all decodes at once can still serve all of them in turns.  That costs the time
to compute their contexts again, which is little if they are ahead by much more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import (
    BatchShape,
    DeadlineRule,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerView,
)
from slosched.policy.kit.memory import lacks_blocks
from slosched.policy.kit.pausing import is_due
from slosched.policy.kit.punctual import Supply, Timed, are_in_time, by_deadline

_RUNNING = RequestStatus.RUNNING
"""A local name, because each attribute look-up on an enum takes 0.1 µs in Python 3.11."""

_FAR_AHEAD = 100.0
"""How much longer than to compute it anew a decode must have, so that it lends its blocks."""
_SOON = 0.5
"""Share of its TTFT within which a prompt has to be due, so that blocks are lent to it."""
_MOST_NEEDED = 0.2
"""Share of the cache that decodes may need, each for the share of the time that its TPOT asks for.
It is small, since steps with prompts last longer than those of decodes alone, and contexts grow."""
_MOST_LENDING = 8
"""Decodes after which no more lend their blocks in the same step; it bounds the cost of a step."""
_TIME_FOR_PROMPTS = 0.5
"""Share of the time beside decodes that prompts may take, those among them that are computed anew.
The rest is for those that arrive meanwhile."""


def lend(
    batch: BatchBuilder, view: SchedulerView, prompts: Sequence[Timed], decodes: Sequence[Request]
) -> None:
    """Preempt decodes that are far ahead for `prompts`, sorted by deadline, that lack KV blocks.

    Blocks go to preempted requests that are due, and then to new prompts that have used up half of
    their TTFT but can be in time.  Each gets those of the decodes that are due last, if these are
    ahead by a hundred times what it takes to compute them anew.  For a new prompt there must be
    time for all prompts together with the decodes that it replaces, and the cache must be large
    enough for all decodes in turns.  As soon as this fails for one, nothing is lent to the others.

    It lends no seats, and nothing under the rule `tbt`, where nobody gets ahead.  Call it before
    anything is added to the step.  O(n log n).
    """
    if view.limits.deadline_rule is DeadlineRule.TBT or view.swapped or batch.num_free_seqs <= 0:
        return
    if not lacks_blocks(prompts, batch.num_free_blocks, view):
        return
    decodes = [request for request in decodes if not batch.has_left(request)]
    if not decodes:
        return
    lending = _Lending(batch, view, prompts, decodes)
    for request, alone_s in lending.wanting():
        is_enough = len(batch.preempted) >= _MOST_LENDING
        if is_enough or not lending.has_room_for(request, alone_s):
            return


class _Lending:
    """The blocks that prompts want in a step, and the decodes that can lend some."""

    def __init__(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        prompts: Sequence[Timed],
        decodes: Sequence[Request],
    ) -> None:
        self._batch, self._view, self._prompts = batch, view, prompts
        self._begun = [r for r, _ in prompts if r.status is _RUNNING]
        shape = BatchShape()
        shape.add_decodes([r.num_computed_tokens + 1 for r in decodes])
        self._all_s = view.model.predict(shape)
        self._lenders = sorted(decodes, key=attrgetter("deadline_s"))
        """Decodes that were not preempted; the last is the first to lend."""
        paused = [r for r, _ in prompts if r.num_output_tokens and r.status is not _RUNNING]
        alive = [*decodes, *paused]
        self._num_needed = sum([self._num_blocks_needed(r) for r in alive])
        tokens_per_s = sum([1 / r.slo.tpot_s for r in alive])
        share = 1 - tokens_per_s * self._all_s / len(decodes)
        self._supply = Supply(view.now_s + self._all_s, _TIME_FOR_PROMPTS * share)
        self._timed = [t for t in prompts if t[0].num_output_tokens or self._is_in_time(*t)]
        self._num_wanted = self._num_seats = 0

    def wanting(self) -> Iterator[Timed]:
        """Yield the prompts that are to have blocks in this step, those that were preempted first.

        They are as many as the step has tokens and seats for.
        """
        now_s, num_left = self._view.now_s, self._view.limits.max_num_batched_tokens
        waiting = [t for t in self._prompts if t[0].status is not _RUNNING]
        due = [t for t in waiting if t[0].num_output_tokens and is_due(*t, self._all_s, now_s)]
        new = [t for t in waiting if not t[0].num_output_tokens and self._is_in_time(*t)]
        for request, alone_s in (*due, *new):
            if num_left <= 0 or self._num_seats >= self._batch.num_free_seqs:
                return
            num_left -= request.num_tokens - request.num_computed_tokens
            yield request, alone_s

    def has_room_for(self, request: Request, alone_s: float) -> bool:
        """Tell whether there are blocks for a prompt, after decodes have lent some if need be."""
        num_wanted = self._num_wanted or self._batch.blocks_kept_free(request)
        num_wanted += self._batch.blocks_missing_at_most(request)
        num_lacking = num_wanted + self._batch.blocks_promised(self._begun)
        num_lacking -= self._batch.num_free_blocks
        if num_lacking > 0 and not self._is_lent(num_lacking, request, alone_s):
            return False
        self._num_wanted, self._num_seats = num_wanted, self._num_seats + 1
        return True

    def _is_lent(self, num_lacking: int, request: Request, alone_s: float) -> bool:
        """Preempt decodes for so many blocks, unless they are too few or should not."""
        is_new = not request.num_output_tokens
        if is_new and not (self._is_soon(request, alone_s) and self._is_cache_enough(request)):
            return False
        until_s = max(0.0, request.deadline_s - self._view.now_s) + alone_s
        lending = self._first_to_lend(num_lacking, until_s)
        if not lending:
            return False
        if is_new:
            timed = by_deadline([*self._timed, *lending])
            if not are_in_time(timed, self._supply):
                return False
            self._timed = timed
            self._num_needed += self._num_blocks_needed(request)
        for decode, _ in lending:
            self._batch.preempt(decode, PreemptionMode.RECOMPUTE)
        del self._lenders[-len(lending) :]
        return True

    def _first_to_lend(self, num_blocks: int, until_s: float) -> list[Timed]:
        """Return the decodes that lend so many blocks, with the time to compute each anew.

        They need none of them within `until_s`.  There are none if they are too few.
        """
        lending: list[Timed] = []
        kv, now_s = self._view.kv, self._view.now_s
        for decode in reversed(self._lenders):
            anew_s = self._view.model.predict_prefill(decode.num_tokens)
            if decode.deadline_s - now_s - _FAR_AHEAD * anew_s <= until_s:
                break
            lending.append((decode, anew_s))
            num_blocks -= kv.num_held_blocks(decode.request_id)
            if num_blocks <= 0:
                return lending
        return []

    def _is_in_time(self, request: Request, alone_s: float) -> bool:
        return request.deadline_s - self._view.now_s > alone_s

    def _is_soon(self, request: Request, alone_s: float) -> bool:
        return request.deadline_s - self._view.now_s - alone_s <= _SOON * request.slo.ttft_s

    def _is_cache_enough(self, request: Request) -> bool:
        num_needed = self._num_needed + self._num_blocks_needed(request)
        return num_needed <= _MOST_NEEDED * self._view.kv.num_blocks

    def _num_blocks_needed(self, request: Request) -> float:
        """Return the blocks of a request, times the share of the time that it needs them."""
        share = min(1.0, self._all_s / request.slo.tpot_s)
        return share * math.ceil(request.num_tokens / self._view.kv.block_size)
