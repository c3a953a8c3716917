"""What TensorRT-LLM's two schedulers are shown and what they say: the seams for one of your own."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slosched.core import Request, SchedulerView


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request that the engine has taken up, whether it has begun or not.

    A paused one is as new: its known tokens are its prompt, what it may still emit its output.
    """

    request: Request
    is_generation: bool
    """Its context is computed: one token is left, and it emits one in each step."""
    num_held_blocks: int
    """KV blocks of its own: from its first chunk on those of its whole context."""
    num_draft_tokens: int = 0
    """Drafted tokens that it wants verified in this step; slosched's engines draft none."""
    new_block: Hashable | None = None
    """The first full block of its context that the prefix cache lacks, if it looks there."""

    @property
    def has_begun(self) -> bool:
        return self.num_held_blocks > 0

    def blocks_to_completion(self, block_size: int) -> int:
        """Blocks beyond its own if it emits all that it may."""
        tokens = self.request.num_prompt_tokens + self.request.max_tokens
        return -(-tokens // block_size) - self.num_held_blocks

    def blocks_for_step(self, block_size: int) -> int:
        """Blocks beyond its own in the next step; a first chunk takes the whole context's."""
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
        return -(-tokens // block_size) - self.num_held_blocks


@dataclass(frozen=True, slots=True)
class Room:
    """What a step has to give."""

    view: SchedulerView
    """Whose limits are the engine's `max_num_tokens` and, for both, `max_batch_size` and
    `max_num_requests`; for a scheduler of your own, the time and the latency model, too."""
    num_free_blocks: int
    """Without those that contexts which have begun will still take."""

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
    """Who may hold resources in this step."""

    fitting: Sequence[ActiveRequest]
    """In order of priority; they have seats and blocks if all of them run."""
    paused: Sequence[ActiveRequest]
    """They have begun and lose their blocks; their blocks may be counted on by those that fit."""


class Part(NamedTuple):
    """What a request computes in this step."""

    active: ActiveRequest
    num_tokens: int
    num_draft_tokens: int = 0
    """Of those that it wanted."""


class CapacityScheduler(Protocol):
    """The first of the two: who may hold resources."""

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        """Choose from `active`, which come in the engine's order."""


class MicroBatchScheduler(Protocol):
    """The second: who of them runs in this step, and with how many tokens."""

    def schedule(self, fitting: Sequence[ActiveRequest], room: Room) -> Sequence[Part]:
        """Fill the step's tokens."""
