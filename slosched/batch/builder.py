"""BatchBuilder: a builder that turns a policy's wishes into one legal step.

A policy calls `add`, `admit` and `preempt` in its order of priority; the builder grants what
tokens, seats, KV blocks, swap traffic, LoRA slots and predicted time allow.  What `build` returns
is always legal.  The builder knows no policy and changes nothing outside itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from slosched.batch.account import RUNNING, SWAPPED, WAITING, StepAccount
from slosched.core import EndReason, PreemptionMode, Request, SchedulerOutput


class BatchBuilder(StepAccount):
    """A step in the making.  Every call is O(1) unless it says otherwise."""

    __slots__ = ()

    def add(
        self, request: Request, max_new_tokens: int | None = None, *, min_new_tokens: int = 1
    ) -> int:
        """Schedule up to `max_new_tokens` (default: all uncomputed) tokens of `request`.

        Return how many were granted: as many as every limit allows, or 0 if KV blocks or time allow
        fewer than `min_new_tokens`.  What is left of the step's tokens may be fewer and is granted.
        A swapped request is brought back first; a waiting one takes a seat.
        """
        n = self._tokens_wanted(request, max_new_tokens)
        if n <= 0 or not self._may_run(request):
            return 0
        least = min(n, min_new_tokens)
        missing = self.blocks_missing(request, n)
        num_free = self.num_free_blocks
        if self._num_watermark_blocks:
            num_free -= self.blocks_kept_free(request)
        if missing > num_free:
            n -= self._tokens_beyond(request, n, missing - num_free)
            missing = num_free
        if self.time_limit_s != math.inf:
            most = n
            n = self._fit_time(request, n, least)
            if n != most:
                missing = self.blocks_missing(request, n)
        if n < least:
            return 0
        self._take(request, n, missing)
        return n

    def admit(
        self,
        request: Request,
        max_new_tokens: int | None = None,
        *,
        min_new_tokens: int = 1,
        reserved_blocks: int = 0,
    ) -> int:
        """`add` a request without device blocks if the free blocks can hold all its known tokens.

        To start a prompt that cannot be finished only takes memory from those that can (vLLM's
        `scheduler_reserve_full_isl`).  `reserved_blocks` are left for others: see
        `blocks_promised`.
        """
        if not self.fits_whole(request, reserved_blocks):
            return 0
        return self.add(request, max_new_tokens, min_new_tokens=min_new_tokens)

    def add_preempting(
        self,
        requests: Iterable[Request],
        victims: list[Request],
        max_new_tokens: int | None = None,
    ) -> None:
        """Add running `requests` in order; where KV blocks run out, preempt from the back.

        `requests` must be a subsequence of `victims`, so that the first one is always served and
        something always runs.  A chunk, of `max_new_tokens` at most, gets all its blocks or none,
        and time is no limit.  O(n).
        """
        if self.num_scheduled_tokens or self._out:
            requests = [r for r in requests if r not in self and not self.has_left(r)]
        requests, block_size = tuple(requests), self._block_size
        # Hundreds of decodes pass here in every step, and nearly all have room in a block that they
        # hold already.  Those between two others are added all at once.
        others = [
            place
            for place, r in enumerate(requests)
            if not (computed := r.num_computed_tokens) % block_size
            or r.num_prompt_tokens + r.num_output_tokens - computed != 1
            or r.lora_id is not None
        ]
        num_missing = self._blocks_for_decodes([requests[place] for place in others])
        if num_missing <= self.num_free_blocks and len(requests) <= self.num_free_tokens:
            self._add_decodes(requests)
            self.num_free_blocks -= num_missing
            return
        begin = 0
        for place in others:
            self._add_decodes(requests[begin:place])
            self._add_or_preempt(requests[place], victims, max_new_tokens)
            begin = place + 1
        self._add_decodes(requests[begin:])

    def _blocks_for_decodes(self, requests: Sequence[Request]) -> int:
        """Return the free blocks that a token of each takes, or more than are free.

        It is more than are free if one of them is no decode, or one with an adapter.
        """
        num_missing = 0
        for r in requests:
            if not r.is_decode or r.lora_id is not None:
                return self.num_free_blocks + 1
            num_missing += max(0, self.blocks_missing(r, 1))
        return num_missing

    def _add_decodes(self, decodes: Sequence[Request]) -> None:
        """Add a token of each of the decodes, which need no block, as far as tokens suffice."""
        if self._out:
            decodes = [r for r in decodes if r.request_id not in self._out]
        decodes = decodes[: max(0, self.num_free_tokens)]
        if decodes:
            self.num_scheduled_tokens.update(dict.fromkeys([r.request_id for r in decodes], 1))
            self.num_free_tokens -= len(decodes)
            self.shape.add_decodes([r.num_computed_tokens + 1 for r in decodes])

    def _add_or_preempt(
        self, request: Request, victims: list[Request], max_new_tokens: int | None
    ) -> None:
        n = self._tokens_wanted(request, max_new_tokens)
        if n <= 0 or not self._may_run(request):
            return
        missing = self.blocks_missing(request, n)
        if missing <= self.num_free_blocks or self.make_room(request, n, victims):
            self._take(request, n, missing)

    def make_room(self, request: Request, num_new_tokens: int, victims: list[Request]) -> bool:
        """Preempt from the back of `victims` until `num_new_tokens` of `request` have blocks.

        `victims` holds every running request that may be preempted, `request` among them, the most
        important first; those that are preempted are removed from it.  Return False if `request`
        itself was preempted.
        """
        while self.blocks_missing(request, num_new_tokens) > self.num_free_blocks:
            victim = victims.pop()
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def preempt(self, request: Request, mode: PreemptionMode | None = None) -> None:
        """Take the seat and the device blocks of a running request that is not in this step.

        Its KV cache moves to the host if `mode` (default: that of the limits) is "swap" and there
        is room; otherwise it is lost and computed anew later.
        """
        if request.request_id in self.num_scheduled_tokens or request.request_id in self._out:
            raise ValueError(f"{request.request_id!r} is already part of this step")
        held = self._view.kv.num_held_blocks(request.request_id)
        self._out.add(request.request_id)
        if self.would_swap_out(request, mode):
            self.swapped_out.append(request.request_id)
            self.num_free_host_blocks -= held
            self.num_free_swap_blocks -= held
            self.shape.num_swapped_blocks += held
        else:
            self.preempted.append(request.request_id)
        self.num_free_blocks += self._ledger.leave(request.request_id)
        self.num_free_seqs += 1

    def reject(self, request: Request, reason: EndReason) -> None:
        """Refuse a request that has emitted nothing yet; it leaves the system in this step."""
        if request.request_id in self.num_scheduled_tokens or request.request_id in self._out:
            raise ValueError(f"{request.request_id!r} is already part of this step")
        self._out.add(request.request_id)
        self.rejected[request.request_id] = reason
        if request.status is WAITING:
            self.rejected_waiting.add(request.request_id)
        elif request.status is RUNNING:
            self.num_free_seqs += 1
            self.num_free_blocks += self._ledger.leave(request.request_id)

    def build(self) -> SchedulerOutput:
        """Return the plan of this step."""
        return SchedulerOutput(
            num_scheduled_tokens=self.num_scheduled_tokens,
            preempted=tuple(self.preempted),
            swapped_out=tuple(self.swapped_out),
            swapped_in=tuple(self.swapped_in),
            rejected=self.rejected,
            num_found_tokens={
                name: n for name, n in self._found.items() if name in self.num_scheduled_tokens
            },
            shape=self.shape,
            is_at_leisure=self.is_at_leisure,
            has_reserve=self.has_reserve,
        )

    def _take(self, request: Request, n: int, num_new_blocks: int) -> None:
        """Count what `n` tokens of `request` cost."""
        self.shape.add(n, self._num_prior_tokens(request))
        self.num_free_tokens -= n
        if num_new_blocks > 0:
            self.num_free_blocks -= num_new_blocks
        self.num_scheduled_tokens[request.request_id] = n
        if request.lora_id is not None:
            self._loras.add(request.lora_id)
        if request.status is not RUNNING:
            self.num_free_seqs -= 1
            num_host_blocks = self._host_blocks(request)
            self.shape.num_swapped_blocks += num_host_blocks
            if request.status is SWAPPED:
                self.swapped_in.append(request.request_id)
                self.num_free_swap_blocks -= num_host_blocks
            self._ledger.start(request.request_id)
