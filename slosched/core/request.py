"""A generation request: what its client asked for, its SLO, and its progress."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from slosched.core.grammar import OutputGrammar


class RequestStatus(StrEnum):
    """The state of a request.  The last three are ends; a request reaches exactly one of them."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
    REJECTED = "rejected"
    ABORTED = "aborted"

    @property
    def is_ended(self) -> bool:
        """Tell whether this is one of the three ends."""
        return self in _ENDED


_ENDED = frozenset({RequestStatus.FINISHED, RequestStatus.REJECTED, RequestStatus.ABORTED})


class EndReason(StrEnum):
    """The reason for which a request finished, was rejected or was aborted."""

    STOP = "stop"
    """Finished: the model ended it (end of sequence, a stop token)."""
    LENGTH = "length"
    """Finished: it reached its output limit."""
    TOO_LONG = "too_long"
    """Rejected: prompt and output limit together can never fit into the KV cache.

    Or the policy cuts no prompt, and a step cannot hold this one.
    """
    EXPIRED = "expired"
    """Rejected: its TTFT deadline has passed."""
    INFEASIBLE = "infeasible"
    """Rejected: even alone on the device it would by now miss its TTFT deadline."""
    CASCADE = "cascade"
    """Rejected: serving it would make several queued requests late."""
    QUEUE_FULL = "queue_full"
    """Rejected: the queue is full."""
    OVERLOAD = "overload"
    """Rejected on arrival: its first token is expected after its TTFT deadline."""
    UNKEEPABLE = "unkeepable"
    """Rejected on arrival: even alone on the device its TTFT or TPOT could not be kept."""
    CLIENT = "client"
    """Aborted: the client went away or cancelled."""
    FAULT = "fault"
    """Aborted: the executor failed while running it."""
    NO_TOKEN = "no_token"
    """Aborted: its own grammar and its other rules for drawing left no token to draw."""
    SHUTDOWN = "shutdown"
    """Aborted: the server stopped before it could be served."""
    SIBLING = "sibling"
    """Aborted: another request of its group was rejected when this one had emitted tokens."""
    TIMEOUT = "timeout"
    """Aborted: it took longer than the server lets a request take."""

    @property
    def status(self) -> RequestStatus:
        """Return the end that this is a reason for."""
        return _STATUS_OF[self._value_]


_ABORTING = frozenset(
    {
        EndReason.CLIENT,
        EndReason.FAULT,
        EndReason.NO_TOKEN,
        EndReason.SHUTDOWN,
        EndReason.SIBLING,
        EndReason.TIMEOUT,
    }
)
# By value, since Python 3.11 takes three times as long to look an enum's member up.
_STATUS_OF = {reason.value: RequestStatus.REJECTED for reason in EndReason}
_STATUS_OF |= {reason.value: RequestStatus.ABORTED for reason in _ABORTING}
_STATUS_OF |= dict.fromkeys((EndReason.STOP.value, EndReason.LENGTH.value), RequestStatus.FINISHED)


class OnInfeasible(StrEnum):
    """What becomes of a request whose SLO cannot be kept, as the policy judges."""

    REJECT = "reject"
    """It is rejected, and its client learns why."""
    RELEGATE = "relegate"
    """It is served without an SLO: best effort, behind all that have a deadline."""
    SERVE = "serve"
    """It is served as one of twice the TTFT and TPOT would be, and twice these if need be, but it
    is judged by what it asked for."""


MAX_LATE_GAP_SHARE = 0.01
"""Largest share of late gaps with which a request keeps its TPOT under the rule `tbt`."""
TOLERANCE_S = 1e-9
"""How much later than due a token may come, since sums of times are rounded."""


class DeadlineRule(StrEnum):
    """The meaning of "on time" for the next token, the same for the policy and for the metrics.

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
        """Return the time at which the next output token of `request` is due."""
        slo = request.slo
        i = request.num_output_tokens
        if i == 0:
            return request.arrival_s + slo.ttft_s
        if self is _MEAN_TPOT:
            return request.token_times_s[0] + i * slo.tpot_s
        if self is _TBT:
            return request.token_times_s[-1] + slo.tpot_s
        return self.anchor_s(request) + i * slo.tpot_s

    def set_deadlines(self, requests: Iterable[Request]) -> None:
        """Set when the next output token of each request is due.

        The rule most in use is written out: for hundreds of requests a call for each takes time.
        """
        if self is not _MEAN_TPOT:
            for request in requests:
                request.deadline_s = self.next_deadline_s(request)
            return
        for request in requests:
            slo, i = request.slo, request.num_output_tokens
            if i:
                request.deadline_s = request.token_times_s[0] + i * slo.tpot_s
            else:
                request.deadline_s = request.arrival_s + slo.ttft_s

    def anchor_s(self, request: Request) -> float:
        """Return the time from which a request that has begun to emit counts its deadlines.

        Its token i is due i * tpot later.  The rule `tbt` has no such time.
        """
        if self is _MEAN_TPOT:
            return request.token_times_s[0]
        return request.arrival_s + request.slo.ttft_s


# Asked for every token; Python 3.11 takes 0.1 µs to find a member by its name.
_TBT, _MEAN_TPOT = DeadlineRule.TBT, DeadlineRule.MEAN_TPOT


@dataclass(frozen=True, slots=True)
class SLO:
    """The service level of one request: time to first token, per output token, end to end."""

    ttft_s: float
    tpot_s: float
    e2e_s: float | None = None

    def __post_init__(self) -> None:
        # Nearly always; every request may bring an SLO of its own.
        if self.ttft_s > 0 and self.tpot_s > 0 and (self.e2e_s is None or self.e2e_s > 0):
            return
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            value = getattr(self, name)
            if value is None and name == "e2e_s":
                continue
            if math.isnan(value) or value <= 0:
                raise ValueError(f"SLO {name} must be a positive number of seconds, not {value!r}")


NO_SLO = SLO(ttft_s=math.inf, tpot_s=math.inf)
"""An SLO that every request meets."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The way in which the torch engine picks the next token.  `temperature=0` is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    """Tokens less than this times as likely as the likeliest one are not drawn."""
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn; None for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output may not contain."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Tokens, each with what is added to its logit."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    grammar: OutputGrammar | None = None
    """The grammar that the output follows; with one it ends where the grammar ends, whatever
    `min_tokens` is."""
    num_logprobs: int | None = None
    """How many of the likeliest tokens the engine tells with their log-probabilities, besides the
    one that it draws; None if it tells none, which takes less time."""
    num_prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, behind the first.  Then all of the prompt is computed:
    nothing of it is looked for in the prefix cache.  Of a group, only the first member tells."""

    @property
    def has_penalties(self) -> bool:
        """Tell whether the tokens so far change the odds of the next one."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)


PLACEHOLDER = -1
"""Id of an output token that a running step is about to emit and only the device knows."""


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
    """Limit on output tokens, as the client gave it.  The true length is not known in advance."""
    slo: SLO = NO_SLO
    prompt_token_ids: Sequence[int] | None = None
    sampling: SamplingParams = SamplingParams()
    priority: int = 0
    """Urgency: lower is served earlier (vLLM's convention).  Only some policies look at it."""
    on_infeasible: OnInfeasible = OnInfeasible.REJECT
    """What is to become of it if its SLO cannot be kept."""
    asked_slo: SLO | None = None
    """The SLO that it came with, if the scheduler serves it by another one (`slo`)."""
    tier: str | None = None
    """The name of the service tier that it belongs to, if the server or the trace has tiers."""
    tenant: str | None = None
    """The name of the tenant that it comes from, if known."""
    session_id: str | None = None
    """The session that it is a turn of, if known."""
    program_s: float | None = None
    """The time promised for that whole session, from its first arrival to its last token."""
    lora_id: str | None = None
    """The LoRA adapter that it needs; equal ids mean equal weights."""
    adapter: object | None = None
    """The weights of that adapter, as a real executor wants them."""
    cache_salt: str | None = None
    """A secret that the requests of one tenant share (vLLM's field).  Only prompts of the same salt
    find each other in the prefix cache, so that no other tenant can tell what they ask."""
    prefix_hashes: Sequence[int] = ()
    """The prompt of a simulated request, which has no tokens: one hash for each block of
    `prefix_block_tokens` tokens.  Prompts that agree in the first n hashes begin with the same n
    blocks."""
    prefix_block_tokens: int | None = None
    group: RequestGroup | None = field(default=None, repr=False)
    """The requests that answer the same prompt, this one among them; None if it is alone."""
    server_s: float = 0.0
    """Time that the server adds outside of the engine, by which `arrival_s` is before the request
    could reach it (`ServerTime.per_request_s`)."""

    status: RequestStatus = RequestStatus.WAITING
    end_reason: EndReason | None = None
    started_s: float | None = None
    """Time at which it first left the queue: the begin of its first step."""
    num_cached_tokens: int = 0
    """Prompt tokens that it found in the prefix cache when it first left the queue."""
    end_s: float | None = None
    deadline_s: float = math.inf
    """Time at which the next token is due under the run's `DeadlineRule`."""
    num_computed_tokens: int = 0
    """Tokens in the KV cache.  While the request waits, these are the tokens that the prefix cache,
    if there is one, would save it."""
    num_output_tokens: int = 0
    """Output tokens so far, also those of a running step while the next one is planned."""
    num_output_placeholders: int = 0
    """Output tokens of id `PLACEHOLDER`, which the running step is still to emit; their entries in
    `token_times_s` are the expected times."""
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
    def is_relegated(self) -> bool:
        """Tell whether it is served without the SLO that it came with."""
        return self.asked_slo is not None and self.on_infeasible is OnInfeasible.RELEGATE

    @property
    def is_best_effort(self) -> bool:
        """Tell whether no promise depends on its next token.

        It has no SLO for that, or it is served although the SLO that it came with is not kept.
        """
        slo = self.slo
        limit_s = slo.tpot_s if self.num_output_tokens else slo.ttft_s
        return self.asked_slo is not None or limit_s == math.inf

    @property
    def judged_slo(self) -> SLO:
        """Return the SLO by which the result is judged: the one that the request came with."""
        return self.slo if self.asked_slo is None else self.asked_slo

    @property
    def tells_prompt(self) -> bool:
        """Tell whether the engine tells log-probabilities of the prompt's tokens."""
        if self.sampling.num_prompt_logprobs is None:
            return False
        return self.group is None or self.group.members[0] is self

    @property
    def num_tokens(self) -> int:
        """Return the number of known tokens: the prompt and every output token so far."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Return the number of known tokens that are not in the KV cache."""
        return self.num_prompt_tokens + self.num_output_tokens - self.num_computed_tokens

    @property
    def is_decode(self) -> bool:
        """Tell whether one token is left to compute, so that the next step emits a token."""
        return self.num_prompt_tokens + self.num_output_tokens - self.num_computed_tokens == 1

    def slack_s(self, now_s: float) -> float:
        """Return the seconds until the next token is due; they are negative if it is late."""
        return self.deadline_s - now_s


@dataclass(slots=True, eq=False)
class RequestGroup:
    """The requests that answer one prompt several times (`n` and `best_of`).

    The first member computes the prompt.  The others wait until it has, and then begin with its KV
    blocks.  A promise to the client holds for the group: it is kept if every member keeps it.  If a
    member is rejected or aborted, all of them end.
    """

    members: Sequence[Request]

    @property
    def group_id(self) -> str:
        """Return the id of the first member."""
        return self.members[0].request_id

    @property
    def num_unfinished(self) -> int:
        """Return the number of members that have not ended.  O(members)."""
        return sum(not member.status.is_ended for member in self.members)


def fan_out(request: Request, num_sequences: int) -> tuple[Request, ...]:
    """Return `request` and its siblings, which together answer its prompt `num_sequences` times.

    Sibling i is named after the request and has its seed plus i, as in vLLM.
    """
    if num_sequences == 1:
        return (request,)
    siblings = [
        replace(
            request,
            request_id=f"{request.request_id}-{i}",
            sampling=replace(request.sampling, seed=_seed_of(request.sampling.seed, i)),
            output_token_ids=[],
            token_times_s=[],
        )
        for i in range(1, num_sequences)
    ]
    members = (request, *siblings)
    group = RequestGroup(members)
    for member in members:
        member.group = group
    return members


def _seed_of(seed: int | None, index: int) -> int | None:
    """Return the seed of a sibling; behind the largest seed, 2**64 - 1, comes 0."""
    if seed is None:
        return None
    return seed + index if seed + index < 2**64 else seed + index - 2**64
