"""A decode replica and its queue of requests that wait for KV blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Never

from slosched.core import Request
from slosched.fleet.pooled import PooledReplica
from slosched.fleet.timeline import Timeline
from slosched.fleet.view import ReplicaKind
from slosched.simulator.simulate import SimulatedReplica


class DecodeReplica(PooledReplica):
    """A replica that reserves the KV blocks of prompts before they are prefilled elsewhere.

    Requests wait in order of arrival until there is a seat and room for the prompt and for
    `reserved_tokens` more tokens of each request that is here.  As long as a preempted request
    waits, nothing is reserved.  So a full decode pool keeps requests from the prefill pool.  These
    are the rules of SGLang's `DecodePreallocQueue`; only, a request that is alone always fits.
    """

    def __init__(
        self,
        index: int,
        kind: ReplicaKind,
        simulated: SimulatedReplica,
        timeline: Timeline,
        delay_s: float,
        reserved_tokens: int,
        on_reserved: Callable[[Request, DecodeReplica], None],
    ) -> None:
        """Take over `simulated`; `on_reserved` gets each request that has its KV blocks."""
        super().__init__(index, kind, simulated, timeline, delay_s)
        self.queue: deque[Request] = deque()
        """Requests that wait for KV blocks."""
        self._reserved_tokens = reserved_tokens
        self._on_reserved = on_reserved

    def send(self, request: Request) -> None:
        """Let a request wait for KV blocks; only the fleet does this."""
        self._note_sent(request)
        self.queue.append(request)
        self._reserve()

    def take_over(self, request: Request) -> None:
        """Let a request run whose prompt's KV has come."""
        self.num_in_transfer -= 1
        now_s = self._clock.now_s()
        self.simulated.take_over(request, now_s)
        self._changes_s = min(self._changes_s, now_s)
        self.wake()

    def cancel(self, request: Request) -> None:
        """Give back the blocks that were reserved for a request that has ended elsewhere."""
        self.free(request)
        self.note_left(request)
        self._reserve()

    def _reserve(self) -> None:
        """Reserve KV blocks for as many waiting requests as possible, between two steps."""
        step_end_s = self.simulated.clock.now_s()
        if step_end_s > self._clock.now_s():
            self._timeline.add(step_end_s, self._reserve)
            return
        while self.queue and self._has_room(self.queue[0]):
            request = self.queue.popleft()
            self.simulated.scheduler.kv.grow(request.request_id, request.num_prompt_tokens)
            self.num_in_transfer += 1
            self._on_reserved(request, self)

    def _after_step(self, _ended: list[Request]) -> None:
        if self.queue:
            self._reserve()

    def _has_room(self, request: Request) -> bool:
        scheduler = self.simulated.scheduler
        if scheduler.num_waiting or scheduler.num_swapped:
            return False
        num_here = scheduler.num_running + self.num_in_transfer
        if num_here == 0:
            return True
        num_tokens = request.num_prompt_tokens + (num_here + 1) * self._reserved_tokens
        num_blocks = -(-num_tokens // scheduler.kv.block_size)
        has_seat = num_here < scheduler.limits.max_num_seqs
        return has_seat and num_blocks <= scheduler.kv.num_free_blocks

    def _steps_until_s(self) -> float:
        """Return the time before which nothing can be sent to it, if nobody waits for its steps."""
        one_s = super()._steps_until_s()
        return one_s if self.queue else max(one_s, self._timeline.next_s)

    def _unfinished_prompts(self) -> Iterator[Never]:
        """Yield nothing: it prefills no prompts."""
        return iter(())
