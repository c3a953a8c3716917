"""A planned step on its way through an executor."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from slosched.core.plan import SchedulerOutput
from slosched.core.request import Request
from slosched.core.shape import BatchShape

NO_BLOCK = -1
"""The entry of a block table in place of a block that the request has given back, since with a
sliding window no token sees it any more."""


class BlockCopy(NamedTuple):
    """One KV block to copy between device and host memory."""

    device_block: int
    host_block: int


class DeviceCopy(NamedTuple):
    """One KV block to copy to another one on the device."""

    source: int
    target: int


class ScheduledChunk(NamedTuple):
    """The tokens [prior, prior + new) of a request that a step computes."""

    request: Request
    num_new_tokens: int
    """Tokens to compute, with the draft tokens that follow the last known one."""
    num_prior_tokens: int
    emits_token: bool
    """Whether the chunk reaches the last known token, so that the next one can be sampled."""
    block_table: Sequence[int]
    """Device blocks of tokens [0, prior + new), in order; there may be more.

    With a sliding window, the first entries may be `NO_BLOCK`, if none of the new tokens sees them.
    """

    @property
    def num_known_outputs(self) -> int:
        """Return the number of output tokens before the one that this chunk may emit.

        Draft tokens count as if all of them were accepted.
        """
        return self.num_prior_tokens + self.num_new_tokens - self.request.num_prompt_tokens


_NO_DECISION = SchedulerOutput()


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """A plan that was accepted and whose blocks are allocated: the input of an executor.

    Swap-outs are copied first, then blocks on the device, then swap-ins; then the chunks run in one
    forward pass.  Swaps are those of swapped requests and those of the prefix cache.
    """

    chunks: tuple[ScheduledChunk, ...]
    swap_out: tuple[BlockCopy, ...]
    swap_in: tuple[BlockCopy, ...]
    shape: BatchShape
    output: SchedulerOutput = _NO_DECISION
    """The decision that the batch carries out."""
    predicted_s: float | None = None
    """Time of the step that the scheduler's latency model predicts; None without one."""
    device_copies: tuple[DeviceCopy, ...] = ()
    """Blocks that the requests of a group share and one of them is about to write to.  All sources
    are read before any target is written."""

    @property
    def drafts(self) -> Mapping[str, Sequence[int]]:
        """Return the draft tokens by request id; they are the last tokens of its chunk."""
        return self.output.draft_token_ids

    @property
    def is_empty(self) -> bool:
        """Tell whether the executor has nothing to do."""
        return not (self.chunks or self.swap_out or self.swap_in)


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the model alone, before temperature and limits."""

    drawn: float
    """That of the token that was drawn."""
    likeliest: tuple[tuple[int, float], ...]
    """The likeliest tokens with theirs, the likeliest first."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of some tokens of a prompt, one after the other, under the model alone."""

    first: int
    """The place of the first of them in the prompt."""
    of_tokens: array[float]
    ranks: array[int]
    """How many tokens are likelier in the place of each, plus one."""
    num_likeliest: int
    likeliest_ids: array[int]
    """The likeliest tokens in the place of each: the first `num_likeliest` are for the first token,
    the likeliest first, and so on."""
    likeliest: array[float]
    """Their log-probabilities."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one executed step."""

    token_ids: Mapping[str, int]
    """The new token of each chunk that emits one."""
    stopped: frozenset[str] = frozenset()
    """Requests that the model ended with their new token."""
    elapsed_s: float = 0.0
    failed: Mapping[str, str] = field(default_factory=dict)
    """Requests that have no token and must end, alone, for the given reasons; what is in their KV
    cache may be wrong."""
    barred: Mapping[str, str] = field(default_factory=dict)
    """Requests whose own rules leave them no token, so that they must end, with what is wrong."""
    logprobs: Mapping[str, Sequence[TokenLogprobs]] = field(default_factory=dict)
    """Log-probabilities at the places of the accepted drafts and of the new token, for requests
    that want them (`SamplingParams.num_logprobs`)."""
    prompt_logprobs: Mapping[str, PromptLogprobs] = field(default_factory=dict)
    """Those of the prompt's tokens behind the ones that were computed, for requests that want them
    (`Request.tells_prompt`).  Each is told once, also if it is computed again."""
    num_accepted: Mapping[str, int] = field(default_factory=dict)
    """How many of its first draft tokens a request emits before its new token; 0 if not named."""


class Executor(Protocol):
    """A device, real or simulated, that runs steps."""

    def execute(self, batch: ScheduledBatch) -> StepResult:
        """Run one step to its end and return its outcome."""

    def release(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended."""


class Clock(Protocol):
    """The only source of time: virtual in the simulator, monotonic in the engine."""

    def now_s(self) -> float:
        """Return the time in seconds."""
