"""The input and output of TensorRT-LLM's two schedulers, for which you can write your own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slosched.core import Request, SchedulerView


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that the engine has taken up, whether it has begun or not.

    A paused one counts as new: its known tokens are its prompt, and what it may still emit is its
    output.
    """

    request: Request
    is_generation: bool
    """True if its context is computed, so that one token is left and it emits one in each step."""
    num_held_blocks: int
    """KV blocks that it holds; from its first chunk on, those of its whole context."""
    num_draft_tokens: int = 0
    """Drafted tokens to be verified in this step; `TRTLLM` leaves it at none."""
    new_block: Hashable | None = None
    """The first full block of its context that is not in the prefix cache, if it uses the cache."""
    num_dropped_blocks: int = 0
    """KV blocks behind its sliding window, which it has given back and needs no more."""

    @property
    def has_begun(self) -> bool:
        return self.num_held_blocks > 0

    def blocks_to_completion(self, block_size: int) -> int:
        """Return the blocks that it needs in addition to its own if it emits all that it may."""
        tokens = self.request.num_prompt_tokens + self.request.max_tokens
        return -(-tokens // block_size) - self.num_held_blocks - self.num_dropped_blocks

    def blocks_for_step(self, block_size: int) -> int:
        """Return the blocks that it needs in addition in the next step.

        A first chunk needs the blocks of the whole context.
        """
        request = self.request
        if self.is_generation:
            tokens = request.num_computed_tokens + 1
        elif self.num_held_blocks:
            return 0
        else:
            tokens = request.num_tokens
        if self.num_draft_tokens:
            left = request.max_tokens - request.num_output_tokens - self.is_generation
            tokens += min(self.num_draft_tokens, left)
        return -(-tokens // block_size) - self.num_held_blocks - self.num_dropped_blocks


@dataclass(frozen=True, slots=True)
class Room:
    """The resources of a step."""

    view: SchedulerView
    """The policy's view.  Its limits are the engine's `max_num_tokens`, and one limit for both
    `max_batch_size` and `max_num_requests`.  A scheduler of your own also finds the time and the
    latency model here."""
    num_free_blocks: int
    """Free blocks, without those that contexts which have begun will still take."""

    @property
    def max_num_requests(self) -> int:
        return self.view.limits.max_num_seqs

    @property
    def max_num_tokens(self) -> int:
        return self.view.limits.max_num_batched_tokens

    @property
    def block_size(self) -> int:
        return self.view.kv.block_size


class Capacity(NamedTuple):
    """The requests that may hold resources in this step."""

    fitting: Sequence[ActiveRequest]
    """Requests in order of priority; there are seats and blocks enough for all of them to run."""
    paused: Sequence[ActiveRequest]
    """Requests that have begun and now lose their blocks, which the fitting ones may use."""


class Part(NamedTuple):
    """The part of a request that a step computes."""

    active: ActiveRequest
    num_tokens: int
    num_draft_tokens: int = 0
    """The number of its wanted draft tokens that the step verifies."""


class CapacityScheduler(Protocol):
    """The first of the two schedulers, which decides which requests may hold resources."""

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        """Choose from `active`, which are in the engine's order."""


class MicroBatchScheduler(Protocol):
    """The second scheduler, which decides which of them run now and with how many tokens."""

    def schedule(self, fitting: Sequence[ActiveRequest], room: Room) -> Sequence[Part]:
        """Return the parts that fill the step's tokens."""
