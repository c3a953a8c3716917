"""A policy, the view that it is shown, and the output that it decides on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from slosched.core.drafts import DraftOffer
from slosched.core.kv import KVView
from slosched.core.request import DeadlineRule, EndReason, Request
from slosched.core.shape import BatchShape, LatencyModel


class PreemptionMode(StrEnum):
    """The fate of a preempted request's KV cache."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits that no step may exceed, and two choices that policy and scheduler share."""

    max_num_batched_tokens: int = 2048
    """Tokens in one step, over all requests."""
    max_num_seqs: int = 256
    """Requests that are RUNNING at once, each of which holds a seat."""
    max_num_swapped_blocks: int | None = None
    """KV blocks of swapped requests that one step copies between device and host, counting both
    directions; None for no limit."""
    max_loras: int | None = None
    """Different LoRA adapters in one step; None for no limit."""
    max_chunk_tokens: int | None = None
    """Tokens of one request in one step, unless no other request is unfinished; None for no limit.
    vLLM's `long_prefill_token_threshold`."""
    num_watermark_blocks: int = 0
    """Free KV blocks that the start of a request leaves to those that run; none if none runs.
    vLLM's `watermark`, which is a share."""
    preemption_mode: PreemptionMode = PreemptionMode.RECOMPUTE
    deadline_rule: DeadlineRule = DeadlineRule.MEAN_TPOT

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_chunk_tokens is not None and self.max_chunk_tokens < 1:
            raise ValueError(f"max_chunk_tokens must be at least 1, not {self.max_chunk_tokens}")
        if self.num_watermark_blocks < 0:
            raise ValueError(
                f"num_watermark_blocks must not be negative, not {self.num_watermark_blocks}"
            )


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Everything that a policy may look at.  It must not change any of it.

    When steps overlap, the view is a forecast; a policy need not know of it.  Requests are shown as
    they will be when the planned step begins.  The tokens of the running step count as emitted, and
    none of them as one at which the model stops.  Requests that will have reached their output
    limit by then are left out.  Arrivals are known up to the moment of planning, which is the begin
    of the running step.
    """

    now_s: float
    """The expected time at which the planned step begins."""
    waiting: Sequence[Request]
    """Requests in order of arrival, with preempted ones in front."""
    running: Sequence[Request]
    """Requests in the order in which they were admitted."""
    swapped: Sequence[Request]
    """Requests in the order in which they were swapped out."""
    kv: KVView
    limits: Limits
    latency_model: LatencyModel | None = None
    num_finishing: int = 0
    """Requests that are not shown because their last token is on its way.  They still hold KV
    blocks."""
    follows_another: bool = False
    """Whether another policy has planned a step since this one planned its last.  Then the time
    since is not that of one step, and requests may run that this policy did not begin."""

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
    """A policy's decision: the requests that run in this step, leave it or come back."""

    num_scheduled_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens to compute by request id; the order of the mapping is the order of priority."""
    preempted: tuple[str, ...] = ()
    """Running requests that lose their KV cache and are computed anew later."""
    swapped_out: tuple[str, ...] = ()
    """Running requests whose KV cache moves to the host."""
    swapped_in: tuple[str, ...] = ()
    """Swapped requests that come back; each is scheduled in the same step."""
    rejected: Mapping[str, EndReason] = field(default_factory=dict)
    """Requests that have emitted nothing yet and are refused, with the reason."""
    num_found_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that new requests take from the prefix cache when their turn in this plan comes.  A
    request that is not named takes what is cached of it before any request gets a block."""
    shape: BatchShape | None = None
    """The shape of the step, if the policy has summed it up already."""
    is_at_leisure: bool = False
    """Whether the step leaves prompt tokens to later steps although there is time for them, so that
    it does not show how fast the device can be."""
    has_reserve: bool = False
    """Whether prompts would get more of the step if they had less time, because decodes would give
    way, so that the device can be faster than it shows."""
    draft_token_ids: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Draft tokens by request id, which the step verifies; they count among the request's scheduled
    tokens.  The scheduler adds them to a policy's plan."""

    @property
    def is_empty(self) -> bool:
        """Tell whether the plan changes nothing."""
        return not (
            self.num_scheduled_tokens
            or self.preempted
            or self.swapped_out
            or self.swapped_in
            or self.rejected
        )


class PromptOrder(StrEnum):
    """The order in which a policy mostly begins prompts."""

    ARRIVAL = "arrival"
    DEADLINE = "deadline"
    LENGTH = "length"
    """The shortest first."""
    PUNCTUAL = "punctual"
    """By deadline while all can be in time; if not, the longest are given up."""

    @property
    def is_by_length(self) -> bool:
        """Tell whether a prompt loses to shorter ones if not all can be in time."""
        return self in (PromptOrder.LENGTH, PromptOrder.PUNCTUAL)


class Policy(ABC):
    """A scheduling policy: a dataclass whose fields are its hyper-parameters.

    It keeps state across steps only where the algorithm itself does, and `reset` clears that state.
    """

    @property
    def prompt_order(self) -> PromptOrder:
        """Return the order of prompts by which others may forecast how long each waits."""
        return PromptOrder.ARRIVAL

    @abstractmethod
    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Return the decision for one step."""

    def choose_drafts(
        self,
        offers: Sequence[DraftOffer],
        output: SchedulerOutput,  # noqa: ARG002
        view: SchedulerView,  # noqa: ARG002
    ) -> Sequence[int]:
        """Return how many draft tokens of each offer a planned step should verify.

        `output` is the plan without drafts, `view` what it was made from.  With speculative
        decoding it is asked after each `schedule`.  The answer may be cut: a request's text may
        give fewer drafts, and tokens and KV blocks are left for fewer.  Default: all that is
        offered.
        """
        return [offer.max_tokens for offer in offers]

    def reset(self) -> None:  # noqa: B027  # most policies have no state
        """Forget everything learnt from earlier steps."""
