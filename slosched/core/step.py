"""A planned step on its way through an executor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from slosched.core.plan import SchedulerOutput
from slosched.core.request import Request
from slosched.core.shape import BatchShape


class BlockCopy(NamedTuple):
    """One KV block to copy between device and host memory."""

    device_block: int
    host_block: int


class ScheduledChunk(NamedTuple):
    """What one request computes in a step: tokens [prior, prior + new) of those it knows."""

    request: Request
    num_new_tokens: int
    num_prior_tokens: int
    emits_token: bool
    """True if the chunk reaches the last known token, so that the next one can be sampled."""
    block_table: Sequence[int]
    """Device blocks that hold tokens [0, prior + new), in order, and maybe more."""

    @property
    def num_known_outputs(self) -> int:
        """Output tokens before the one that this chunk emits, if it does."""
        return self.num_prior_tokens + self.num_new_tokens - self.request.num_prompt_tokens


_NO_DECISION = SchedulerOutput()


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A plan that was accepted and whose blocks are allocated: what an executor runs.

    Swap-outs are copied first, then swap-ins, then the chunks run in one forward pass.  Both are
    those of swapped requests and of the prefix cache.
    """

    chunks: tuple[ScheduledChunk, ...]
    swap_out: tuple[BlockCopy, ...]
    swap_in: tuple[BlockCopy, ...]
    shape: BatchShape
    output: SchedulerOutput = _NO_DECISION
    """The decision that it carries out."""
    predicted_s: float | None = None
    """How long the scheduler's latency model, if it has one, expects the step to take."""

    @property
    def is_empty(self) -> bool:
        """True if the executor has nothing to do."""
        return not (self.chunks or self.swap_out or self.swap_in)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What came out of one executed step."""

    token_ids: Mapping[str, int]
    """The new token of each chunk that emits one."""
    stopped: frozenset[str] = frozenset()
    """Requests whose new token is their last by the model's own decision."""
    elapsed_s: float = 0.0


class Executor(Protocol):
    """The seam between simulation and reality."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step to its end."""

    def release(self, request_id: str) -> None:
        """The request has ended; drop whatever is kept for it."""


class Clock(Protocol):
    """Virtual in the simulator, monotonic in the engine; nothing else reads a clock."""

    def now_s(self) -> float: ...
