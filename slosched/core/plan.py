"""What a policy is shown, what it decides, and what a policy is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slosched.core.kv import KVView
from slosched.core.request import DeadlineRule, EndReason, Request
from slosched.core.shape import BatchShape, LatencyModel


class PreemptionMode(StrEnum):
    """What happens to the KV cache of a preempted request."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Limits:
    """What no step may exceed, and the two choices that policy and host must share."""

    max_num_batched_tokens: int = 2048
    """Tokens in one step, over all requests."""
    max_num_seqs: int = 256
    """Requests that hold a seat (are RUNNING) at once."""
    max_num_swapped_blocks: int | None = None
    """KV blocks of swapped requests copied between device and host in one step, both ways; None
    for no limit."""
    max_loras: int | None = None
    """Different LoRA adapters in one step; None for no limit."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    deadline_rule: DeadlineRule = DeadlineRule.MEAN_TPOT

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Everything that a policy may look at.  It must not change any of it.

    With overlapped stepping it is a forecast, so that a policy need not know: the requests as they
    will be when the planned step begins, the tokens of the running step counted as emitted, and
    none of them the model's own last.  Who will then have reached its output limit is not shown.
    Arrivals are known up to the moment of planning, the begin of the running step.
    """

    now_s: float
    """When the planned step begins, as far as can be known."""
    waiting: Sequence[Request]
    """In arrival order, but preempted requests stand in front."""
    running: Sequence[Request]
    """In the order in which they were admitted."""
    swapped: Sequence[Request]
    """In the order in which they were swapped out."""
    kv: KVView
    limits: Limits
    latency_model: LatencyModel | None = None

    @property
    def model(self) -> LatencyModel:
        """Return the latency model; raise ValueError if the scheduler was given none."""
        if self.latency_model is None:
            raise ValueError(
                "this policy predicts how long steps take: give the scheduler a latency model"
            )
        return self.latency_model


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A policy's decision: what to run in this step and what to do to the others."""

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens to compute by request id; the order of the mapping is the order of priority."""
    preempted: tuple[str, ...] = ()
    """Running requests that lose their KV cache and are computed anew later."""
    swapped_out: tuple[str, ...] = ()
    swapped_in: tuple[str, ...] = ()
    rejected: Mapping[str, EndReason] = field(default_factory=dict)
    """Requests that have emitted nothing yet and never will, with the reason."""
    num_found_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of new requests that take from the prefix cache what it has when their turn comes: how many
    tokens that is.  All others hold what is cached of them before anybody gets a block."""
    shape: BatchShape | None = None
    """The shape of the step, if whoever planned it has summed it up already."""

    @property
    def is_empty(self) -> bool:
        return not (
            self.num_scheduled_tokens
            or self.preempted
            or self.swapped_out
            or self.swapped_in
            or self.rejected
        )


class Policy(ABC):
    """A scheduling policy: a dataclass whose fields are its hyper-parameters.

    State across steps is allowed only where the algorithm itself has it; `reset` clears it.
    """

    @abstractmethod
    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Decide one step."""

    def reset(self) -> None:  # noqa: B027  # most policies have no state
        """Forget everything learnt from earlier steps."""
