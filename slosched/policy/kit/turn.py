"""A step in which some requests come first, whatever the policy that plans the other steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import PreemptionMode, Request, RequestStatus, SchedulerOutput, SchedulerView
from slosched.policy.kit.deferred import add_without_preempting


def plan_turn(
    view: SchedulerView, is_mine: Callable[[Request], bool], share: float, max_tokens: int
) -> SchedulerOutput | None:
    """Return a step for the requests that `is_mine` picks; None if none of them can be served.

    Their decodes come first, then their prompts that have begun, then the others of them by
    deadline, those whose deadline has passed last.  They get at most `max_tokens`, and leave room
    for the decodes of others, up to 1 - `share` of the step.  Others are preempted, the youngest
    first, where one of these requests needs KV blocks to go on, or a seat or blocks to start and
    those that run do not fill the share.  Decodes of others then fill the step, those first that
    are due first; if some of these requests have tokens left, only up to 1 - `share` of all tokens.
    """
    turn = _Turn(view, is_mine, share, max_tokens)
    turn.go_on()
    turn.start()
    return turn.filled()


class _Turn:
    def __init__(
        self,
        view: SchedulerView,
        is_mine: Callable[[Request], bool],
        share: float,
        max_tokens: int,
    ) -> None:
        self._batch = BatchBuilder(view)
        self._view = view
        self._share = share
        self._mine = [r for r in view.running if is_mine(r)]
        self._others = [r for r in view.running if not is_mine(r)]
        """Running requests that may be preempted, the youngest last."""
        away = [r for r in chain(view.swapped, view.waiting) if is_mine(r)]
        self._away = sorted(away, key=lambda r: (r.deadline_s < view.now_s, r.deadline_s))
        num_decodes = sum([r.is_decode for r in self._others])
        budget = view.limits.max_num_batched_tokens
        reserved = min(num_decodes, int((1 - share) * budget))
        self._most = max(1, min(max_tokens, budget - reserved))
        self._wanted = min(self._most, math.ceil(share * (self._most + reserved)))
        """Tokens with which these requests have their share of the step."""
        self._num_tokens = 0
        self._has_left = False

    def go_on(self) -> None:
        """Add the running requests, decodes first."""
        for request in sorted(self._mine, key=lambda r: not r.is_decode):
            n = min(request.num_uncomputed_tokens, self._most - self._num_tokens)
            if n > 0:
                self._free_blocks(self._batch.blocks_missing(request, n))
            self._note(request, self._batch.add(request, n) if n > 0 else 0)

    def start(self) -> None:
        """Start the others, or bring them back, until one finds no room."""
        begun = [r for r in self._mine if not r.is_decode]
        for i, request in enumerate(self._away):
            n = self._started(request, begun) if self._num_tokens < self._most else 0
            self._note(request, n)
            if not n:
                self._has_left = self._has_left or i + 1 < len(self._away)
                return
            begun.append(request)

    def filled(self) -> SchedulerOutput | None:
        """Fill the step with decodes of others, and return it; None if it serves none of these."""
        if not self._num_tokens:
            return None
        decodes = sorted(
            (r for r in self._others if r.is_decode and not self._batch.has_left(r)),
            key=attrgetter("deadline_s"),
        )
        most = self._batch.num_free_tokens
        if self._has_left:
            most = min(most, int(self._num_tokens * (1 - self._share) / self._share))
        add_without_preempting(self._batch, decodes[:most])
        return self._batch.build()

    def _note(self, request: Request, num_granted: int) -> None:
        self._num_tokens += num_granted
        self._has_left = self._has_left or num_granted < request.num_uncomputed_tokens

    def _started(self, request: Request, begun: Sequence[Request]) -> int:
        """Start a request if there is room, and return its tokens in the step.

        If these requests do not fill their share, others are preempted to make room.  `begun` are
        prompts of these requests, for whose KV blocks no other request of them may start.
        """
        batch, most = self._batch, self._most - self._num_tokens
        reserved, promised = map(batch.blocks_promised, (begun, self._others))
        if n := batch.admit(request, most, reserved_blocks=reserved + promised):
            return n
        if self._num_tokens >= self._wanted or not self._others:
            return 0
        missing = batch.blocks_missing(request, request.num_uncomputed_tokens)
        missing += self._kept_free(request, missing)
        # The blocks that a swapped request needs back must not use up the copies of the step.
        mode = PreemptionMode.RECOMPUTE if request.status is RequestStatus.SWAPPED else None
        if not self._free_blocks(missing + reserved, mode, promised):
            return 0
        if batch.num_free_seqs <= 0 and self._others:
            batch.preempt(self._others.pop(), mode)
        reserved += batch.blocks_promised(self._others)
        return batch.admit(request, most, reserved_blocks=reserved)

    def _kept_free(self, request: Request, num_missing: int) -> int:
        """Return the blocks to free for a request beside its own, as it leaves some free.

        If it finds room for both only alone, that is what all others hold: alone it leaves none.
        """
        kept_free = self._batch.blocks_kept_free(request)
        if self._mine or self._num_tokens:
            return kept_free
        most_free = self._batch.num_free_blocks + sum(map(self._num_held, self._others))
        return max(0, min(kept_free, most_free - num_missing))

    def _free_blocks(
        self, num_blocks: int, mode: PreemptionMode | None = None, promised: int = 0
    ) -> bool:
        """Preempt others until so many blocks are free; preempt none if that is not enough.

        `promised` are blocks that have to be left for the prompts that the others have begun, else
        two prompts would wait for each other's blocks.
        """
        batch = self._batch
        if num_blocks + promised <= batch.num_free_blocks:
            return True
        held = sum(map(self._num_held, self._others))
        if batch.num_free_blocks + held < num_blocks:
            return False
        while num_blocks + promised > batch.num_free_blocks and self._others:
            victim = self._others.pop()
            promised -= batch.blocks_promised((victim,)) if promised else 0
            batch.preempt(victim, mode)
        return num_blocks + promised <= batch.num_free_blocks

    def _num_held(self, request: Request) -> int:
        return self._view.kv.num_held_blocks(request.request_id)
