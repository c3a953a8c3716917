"""The words of slosched: every noun and every protocol, and nothing that acts.

Read this file first.  The rest of the package is verbs over these nouns: a `Policy` turns a
read-only `SchedulerView` into a `SchedulerOutput`, the `Scheduler` carries it out as a
`ScheduledBatch`, an `Executor` runs that and reports a `StepResult`.

All times are seconds on one clock.  This module knows no clock, no queue and no tensor, and it
imports nothing of ours.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class SloschedError(Exception):
    """Base of the errors that slosched raises for a reason it can name."""


class IllegalPlanError(SloschedError):
    """A policy returned a plan that breaks a limit; nothing of it was carried out."""


class StalledError(SloschedError):
    """Work is pending, nothing is scheduled, and no arrival will ever change that."""


class RequestStatus(StrEnum):
    """Where a request is.  The last three are ends; a request reaches exactly one of them."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"

    @property
    def is_ended(self) -> bool:
        return self in _ENDED


_ENDED = frozenset({RequestStatus.FINISHED, RequestStatus.REJECTED, RequestStatus.ABORTED})


class EndReason(StrEnum):
    """Why a request ended: how it finished, why it was rejected, or who aborted it."""

    STOP = "stop"
    """Finished: the model ended it (end of sequence, a stop token)."""
    LENGTH = "length"
    """Finished: it reached its output limit."""
    TOO_LONG = "too_long"
    """Rejected: prompt and output limit together can never fit into the KV cache."""
    EXPIRED = "expired"
    """Rejected: its TTFT deadline has passed."""
    INFEASIBLE = "infeasible"
    """Rejected: even alone on the device it would miss its TTFT deadline."""
    CASCADE = "cascade"
    """Rejected: serving it would make several queued requests late."""
    QUEUE_FULL = "queue_full"
    """Rejected: as many are waiting as may."""
    CLIENT = "client"
    """Aborted: the client went away or cancelled."""
    FAULT = "fault"
    """Aborted: the executor failed while running it."""
    SHUTDOWN = "shutdown"
    """Aborted: the server stopped before it could be served."""

    @property
    def status(self) -> RequestStatus:
        """The end that this is a reason for."""
        if self in _FINISHING:
            return RequestStatus.FINISHED
        return RequestStatus.ABORTED if self in _ABORTING else RequestStatus.REJECTED


_FINISHING = frozenset({EndReason.STOP, EndReason.LENGTH})
_ABORTING = frozenset({EndReason.CLIENT, EndReason.FAULT, EndReason.SHUTDOWN})


class PreemptionMode(StrEnum):
    """What happens to the KV cache of a preempted request."""

    RECOMPUTE = "recompute"
    SWAP = "swap"


class DeadlineRule(StrEnum):
    """What "on time" means for the next token; chosen once for the policy and the metric alike.

    With a = arrival, t_j = time of output token j and i = number of tokens already out, the next
    token is due at

    * ``envelope``: a + ttft + i * tpot.  Early tokens bank slack (FairBatching, PolyServe).
    * ``mean_tpot``: a + ttft for the first, then t_0 + i * tpot (DistServe, vLLM `--goodput`).
    * ``tbt``: a + ttft for the first, then t_(i-1) + tpot (Sarathi-Serve).
    """

    ENVELOPE = "envelope"
    MEAN_TPOT = "mean_tpot"
    TBT = "tbt"

    def next_deadline_s(self, request: Request) -> float:
        """When the next output token of `request` is due."""
        slo = request.slo
        i = request.num_output_tokens
        if i == 0:
            return request.arrival_s + slo.ttft_s
        if self is _TBT:
            return request.token_times_s[-1] + slo.tpot_s
        return self.anchor_s(request) + i * slo.tpot_s

    def anchor_s(self, request: Request) -> float:
        """What a request that has begun to emit counts from: token i is due i * tpot later.

        Under `tbt` there is none.
        """
        if self is _MEAN_TPOT:
            return request.token_times_s[0]
        return request.arrival_s + request.slo.ttft_s


# Asked for every token; Python 3.11 takes 0.1 µs to find a member by its name.
_TBT, _MEAN_TPOT = DeadlineRule.TBT, DeadlineRule.MEAN_TPOT


@dataclass(frozen=True, slots=True)
class SLO:
    """What one request was promised: time to first token, time per output token, end to end."""

    ttft_s: float
    tpot_s: float
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is None and name == "e2e_s":
                continue
            if math.isnan(value) or value <= 0:
                raise ValueError(f"SLO {name} must be a positive number of seconds, not {value!r}")


NO_SLO = SLO(ttft_s=math.inf, tpot_s=math.inf)
"""A promise that cannot be broken."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the torch engine picks the next token.  `temperature=0` is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()


PLACEHOLDER = -1
"""Id of an output token that a running step is about to emit: known to the device alone."""


@dataclass(slots=True, eq=False)
class Request:
    """One generation request.  Policies read it; only the Scheduler writes its progress.

    There is no prefill phase and no decode phase: `num_tokens` tokens are known (prompt and
    output), `num_computed_tokens` of them are in the KV cache, and a step schedules some of the
    difference.  A decode is the case where the difference is one.
    """

    request_id: str
    arrival_s: float
    num_prompt_tokens: int
    max_tokens: int
    """Limit on output tokens, as the client gave it.  The true length is nobody's to know."""
    slo: SLO = NO_SLO
    prompt_token_ids: Sequence[int] | None = None
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """Lower is served earlier (vLLM's convention); only some policies look at it."""
    lora_id: str | None = None
    cache_salt: str | None = None
    """Prompts are looked up in the prefix cache among those of the same salt alone: a secret that
    one tenant's requests share, so that no other can tell what they ask (vLLM's field)."""
    prefix_hashes: Sequence[int] = ()
    """What a simulated request, which has no tokens, says of its prompt: one hash a block of
    `prefix_block_tokens` tokens.  Those that agree in the first n have the same n blocks."""
    prefix_block_tokens: int | None = None

    status: RequestStatus = RequestStatus.WAITING
    end_reason: EndReason | None = None
    started_s: float | None = None
    """When it first left the queue: the begin of the step that computed its first token."""
    num_cached_tokens: int = 0
    """Tokens of its prompt that it found in the prefix cache when it first left the queue."""
    end_s: float | None = None
    deadline_s: float = math.inf
    """When the next token is due under the run's `DeadlineRule`."""
    num_computed_tokens: int = 0
    """While it waits: how many of its tokens the prefix cache, if there is one, would save it."""
    num_output_tokens: int = 0
    """Tokens that have come out; while a step runs and the next is planned, its own as well."""
    num_output_placeholders: int = 0
    """How many of those are still to come: of id `PLACEHOLDER`, at the time they are expected."""
    output_token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_swaps: int = 0

    def __post_init__(self) -> None:
        if self.num_prompt_tokens < 1:
            raise ValueError(
                f"request {self.request_id!r} needs a prompt of at least one token, "
                f"not {self.num_prompt_tokens}"
            )
        if self.max_tokens < 1:
            raise ValueError(
                f"request {self.request_id!r} needs max_tokens >= 1, not {self.max_tokens}"
            )
        if self.prompt_token_ids is not None and len(self.prompt_token_ids) != (
            self.num_prompt_tokens
        ):
            raise ValueError(
                f"request {self.request_id!r} says {self.num_prompt_tokens} prompt tokens "
                f"but carries {len(self.prompt_token_ids)}"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt and every output token so far."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens - self.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        """True if one token is left to compute, so that the next step emits a token."""
        return self.num_prompt_tokens + self.num_output_tokens - self.num_computed_tokens == 1

    def slack_s(self, now_s: float) -> float:
        """Seconds until the next token is due; negative if it is late."""
        return self.deadline_s - now_s


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


class KVView(Protocol):
    """The KV cache as a policy sees it: counts, no tensors and no way to change them."""

    @property
    def block_size(self) -> int:
        """Tokens in one KV block."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_free_host_blocks(self) -> int: ...

    def num_held_blocks(self, request_id: str) -> int:
        """Blocks that the request holds on the device."""

    def num_held_host_blocks(self, request_id: str) -> int:
        """Blocks that the request holds in host memory."""

    def ledger(self) -> BlockLedger:
        """For one plan, before anything of it is entered."""


class BlockLedger(Protocol):
    """What a plan does to the free blocks; requests may share theirs (prefix cache).

    `num_held_blocks` of a request counts the blocks that others hold, too.  Here it is exact,
    whatever order the plan is made in.
    """

    def num_ready_blocks(self, request_id: str) -> int:
        """Blocks of its computed tokens that need not be taken from the free ones.

        Of a running request all; of any other those, of what is cached, that somebody holds.
        """

    def num_blocks_to_load(self, request_id: str) -> int:
        """Blocks that are copied from the host when this waiting request starts.

        They are counted among those that it takes from the free ones.
        """

    def find(self, request_id: str, planned: Mapping[str, int], num_lent: int = 0) -> int | None:
        """Tokens of a waiting request that will be cached when it starts after those `planned`.

        `planned` are the tokens by request of the plan so far, in its order, and only ever grow;
        before them `num_lent` blocks go to decodes beside the plan.  None if it is what the
        request says, whatever is planned.
        """

    def start(self, request_id: str) -> None:
        """A waiting or swapped request holds what is cached of it, or was found last."""

    def leave(self, request_id: str) -> int:
        """A running request gives up its blocks; how many of them become free."""


class BlockNames(Protocol):
    """Where KV blocks of equal content become one: what names the content, and who holds it."""

    def names(self, request_id: str, num_tokens: int) -> Sequence[Hashable]:
        """Of the full blocks of a request's first `num_tokens` tokens, as far as can be known.

        Equal names mean equal content, from the first token on.
        """

    def num_holders(self, name: Hashable) -> int:
        """Requests that hold a block of this name, the content of which is computed or planned."""


ATTENTION_TILE_TOKENS = 64
"""Query rows that one block of an attention kernel works on (FlashAttention-2's size for most)."""


class BatchShape:
    """The sums and maxima on which the time of a step depends; adding a request is O(1).

    A request that computes one token is a decode, any other is a prefill chunk: the same rule as
    for `Request.is_decode`, and the one that attention kernels follow.
    """

    __slots__ = (
        "decode_context_tokens",
        "max_context_tokens",
        "max_decode_context_tokens",
        "num_decodes",
        "num_prefill_tiles",
        "num_prefill_tokens",
        "num_prefills",
        "num_swapped_blocks",
        "prefill_attention_tokens",
        "prefill_context_tokens",
        "prefill_tile_tokens",
        "squared_chunk_tokens",
    )

    def __init__(self) -> None:
        self.num_prefill_tokens = 0
        """t: tokens of all prefill chunks."""
        self.num_prefills = 0
        self.num_decodes = 0
        """Bd."""
        self.prefill_attention_tokens = 0
        """t2: sum of chunk * (prior + (chunk + 1) / 2), the exact (query, key) pairs."""
        self.squared_chunk_tokens = 0
        """Sum of chunk**2: t2 as the mission's text has it, kept for comparison."""
        self.prefill_context_tokens = 0
        """Sum of prior + chunk over the chunks: the keys that their attention reads."""
        self.num_prefill_tiles = 0
        """Sum of ceil(chunk / 64): blocks of query rows that an attention kernel works on."""
        self.prefill_tile_tokens = 0
        """Sum over those blocks of the keys that each walks, up to its own last row."""
        self.decode_context_tokens = 0
        """t3: sum of the context lengths of the decodes, their own token included."""
        self.max_context_tokens = 0
        """The longest context of all, the tokens of this step included."""
        self.max_decode_context_tokens = 0
        self.num_swapped_blocks = 0
        """KV blocks copied between device and host, both ways."""

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decodes

    @property
    def num_reqs(self) -> int:
        return self.num_prefills + self.num_decodes

    def add(self, num_new_tokens: int, num_prior_tokens: int) -> None:
        """Add a request that computes `num_new_tokens` on top of `num_prior_tokens` cached ones."""
        context = num_prior_tokens + num_new_tokens
        if num_new_tokens == 1:
            self.num_decodes += 1
            self.decode_context_tokens += context
            if context > self.max_decode_context_tokens:
                self.max_decode_context_tokens = context
        else:
            # Full tile i walks prior + 64 i keys, i = 1 … full; a last, shorter one walks all.
            tiles = num_new_tokens // ATTENTION_TILE_TOKENS
            walked = tiles * (num_prior_tokens + (tiles + 1) * (ATTENTION_TILE_TOKENS // 2))
            if num_new_tokens % ATTENTION_TILE_TOKENS:
                tiles += 1
                walked += context
            squared = num_new_tokens * num_new_tokens
            self.num_prefills += 1
            self.num_prefill_tokens += num_new_tokens
            self.prefill_attention_tokens += (
                num_new_tokens * num_prior_tokens + (squared + num_new_tokens) // 2
            )
            self.squared_chunk_tokens += squared
            self.prefill_context_tokens += context
            self.num_prefill_tiles += tiles
            self.prefill_tile_tokens += walked
        if context > self.max_context_tokens:
            self.max_context_tokens = context

    def add_decodes(self, contexts: Sequence[int]) -> None:
        """Add decodes at once; their context lengths include the token that they compute."""
        self.num_decodes += len(contexts)
        self.decode_context_tokens += sum(contexts)
        longest = max(contexts)
        self.max_decode_context_tokens = max(self.max_decode_context_tokens, longest)
        self.max_context_tokens = max(self.max_context_tokens, longest)

    @classmethod
    def of_decodes(cls, decodes: DecodeGroup) -> BatchShape:
        """A step that serves these and nobody else."""
        shape = cls()
        shape.num_decodes = decodes.num_decodes
        shape.decode_context_tokens = decodes.context_tokens
        shape.max_decode_context_tokens = shape.max_context_tokens = decodes.max_context_tokens
        return shape

    @property
    def sums(self) -> tuple[int, ...]:
        """All of them, for `restore`: how a request is taken back, or many."""
        return (
            self.num_prefill_tokens,
            self.num_prefills,
            self.num_decodes,
            self.prefill_attention_tokens,
            self.squared_chunk_tokens,
            self.prefill_context_tokens,
            self.num_prefill_tiles,
            self.prefill_tile_tokens,
            self.decode_context_tokens,
            self.max_context_tokens,
            self.max_decode_context_tokens,
            self.num_swapped_blocks,
        )

    def restore(self, sums: tuple[int, ...]) -> None:
        """Make this shape what it was when it said `sums`."""
        (
            self.num_prefill_tokens,
            self.num_prefills,
            self.num_decodes,
            self.prefill_attention_tokens,
            self.squared_chunk_tokens,
            self.prefill_context_tokens,
            self.num_prefill_tiles,
            self.prefill_tile_tokens,
            self.decode_context_tokens,
            self.max_context_tokens,
            self.max_decode_context_tokens,
            self.num_swapped_blocks,
        ) = sums

    def copy(self) -> BatchShape:
        twin = BatchShape.__new__(BatchShape)
        twin.restore(self.sums)
        return twin

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchShape) and self.as_dict() == other.as_dict()

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value}" for name, value in self.as_dict().items() if value)
        return f"BatchShape({inside})"


class DecodeGroup(Protocol):
    """Running decodes, of which each gets one token in a step, as sums over all of them."""

    num_decodes: int
    context_tokens: int
    """Sum of their context lengths, the token of this step included."""
    max_context_tokens: int
    are_oldest: bool
    """True if every other running request was admitted after the last of them."""

    @property
    def num_by_tpot_s(self) -> Mapping[float, int]:
        """How many of them were promised each TPOT; none with a count of zero."""

    def num_by(self, key: Callable[[Request], Hashable]) -> Mapping[Hashable, int]:
        """How many of them have each value of `key`, which is to be constant; none with zero.

        Counted anew for each function, so hand in the same one in every step.
        """

    @property
    def num_new_blocks(self) -> int:
        """KV blocks that their tokens of this step take from the free ones."""

    @property
    def first_deadline_s(self) -> float:
        """When the most urgent of them has to have its next token."""


class LatencyModel(Protocol):
    """How long a step takes.  Monotone: adding to a shape never makes it faster.

    One exception is the device's own: a kernel that takes chunks and decodes at once may be a
    little faster than the decodes' own (by 2 % at most in the bundled models), so that a first,
    tiny chunk may seem to cost nothing.
    """

    def predict(self, shape: BatchShape) -> float:
        """Seconds for one step of this shape."""

    def predict_upper(self, shape: BatchShape) -> float:
        """Seconds that at most 1 % of such steps exceed; never below `predict`."""

    def predict_prefill(self, num_new_tokens: int, num_prior_tokens: int = 0) -> float:
        """Seconds for a step that holds nothing but this one chunk; cached, so nearly free."""

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn from a step that was executed."""


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
    block_names: BlockNames | None = None
    """None if the KV cache keeps blocks of equal content apart."""


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
    repeated: frozenset[str] = frozenset()
    """Scheduled requests whose one token is the last one that is computed already, once more: they
    have their place in the step, and get no further."""
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


TRIED = "tried"
"""Key of a field's metadata under which `tunable` keeps the values."""


def tunable(default: Any, *others: object) -> Any:
    """A field of a policy, with the values that `slosched tune` tries for it."""
    return field(default=default, metadata={TRIED: (default, *others)})


class Policy(ABC):
    """A scheduling policy: a dataclass whose fields are its hyper-parameters.

    State across steps is allowed only where the algorithm itself has it; `reset` clears it.
    """

    @abstractmethod
    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        """Decide one step."""

    def schedule_beside(
        self,
        decodes: DecodeGroup,  # noqa: ARG002  # a default
        view: SchedulerView,  # noqa: ARG002
    ) -> SchedulerOutput | None:
        """`schedule`, given that each of `decodes` gets its token; None to be asked about each.

        For policies that treat decodes alike: the simulator then need not touch them one by one.
        `view` shows all the others, `decodes` are served beside the plan, which must neither
        preempt nor swap; whatever is planned must be what `schedule` would have, decodes apart.
        Asked only if nobody is swapped out, no LoRA limit is set, and there are blocks for the
        decodes' tokens.  Default: always None.
        """
        return None

    def decodes_until_s(
        self,
        decodes: DecodeGroup,  # noqa: ARG002  # a default
        limits: Limits,  # noqa: ARG002
    ) -> float:
        """How long it is certain to give each of `decodes` one token and to do nothing else.

        The promise is for the case that nobody else is there and that blocks suffice.  It holds
        for steps that are predicted to end before the returned time, until a request arrives or
        ends: the simulator runs them without asking.  Default: never.
        """
        return -math.inf

    def heeded_fields(self) -> Mapping[str, str]:
        """Return the fields of `Request` that an option has this policy go by, with that option.

        For example {"priority": "policy=priority"}.  On requests that all have the same value there
        such an option changes nothing, and the command line says so.  Default: none.
        """
        return {}

    def reset(self) -> None:  # noqa: B027  # most policies have no state
        """Forget everything learnt from earlier steps."""


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
    output: SchedulerOutput = SchedulerOutput()
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
