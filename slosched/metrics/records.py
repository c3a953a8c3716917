"""Records of requests and steps that are over: all that the metrics see."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slosched.core import SLO, EndReason, Request, RequestStatus


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The outcome of one request, which may not have ended if the replay was cut off.

    Another server must report just this to be scored: arrival, prompt length, SLO, the time of each
    token and how the request ended.
    """

    request_id: str
    arrival_s: float
    """The time at which it was to arrive, even if a slow client sent it later."""
    num_prompt_tokens: int
    num_output_tokens: int
    """Number of tokens that came out; `token_times_s` has one time for each."""
    slo: SLO
    status: RequestStatus
    end_reason: EndReason | None = None
    token_times_s: Sequence[float] = ()
    """Times in seconds that never decrease, kept as an array of doubles to save memory."""
    end_s: float | None = None
    num_preemptions: int = 0
    num_swaps: int = 0
    started_s: float | None = None
    """The time at which its first token was computed, if known; until then it was queued."""
    num_cached_tokens: int = 0
    """Tokens of the prompt that were found in the prefix cache."""
    priority: int = 0
    lora_id: str | None = None
    tier: str | None = None
    tenant: str | None = None
    session_id: str | None = None
    program_s: float | None = None
    """The time promised for its whole session, from the first arrival to the last token."""
    is_relegated: bool = False
    """Whether it had to do without its SLO; then it is not good."""

    def __post_init__(self) -> None:
        if len(self.token_times_s) != self.num_output_tokens:
            raise ValueError(
                f"request {self.request_id!r} has {self.num_output_tokens} output tokens "
                f"but {len(self.token_times_s)} token times"
            )
        object.__setattr__(self, "token_times_s", array("d", self.token_times_s))

    @classmethod
    def from_request(cls, request: Request) -> RequestRecord:
        """Copy the request's present state; later progress does not change the record."""
        return cls(
            request_id=request.request_id,
            arrival_s=request.arrival_s,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            slo=request.judged_slo,
            tier=request.tier,
            tenant=request.tenant,
            status=request.status,
            end_reason=request.end_reason,
            token_times_s=request.token_times_s,
            end_s=request.end_s,
            num_preemptions=request.num_preemptions,
            num_swaps=request.num_swaps,
            started_s=request.started_s,
            num_cached_tokens=request.num_cached_tokens,
            priority=request.priority,
            lora_id=request.lora_id,
            session_id=request.session_id,
            program_s=request.program_s,
            is_relegated=request.is_relegated,
        )

    @property
    def ttft_s(self) -> float | None:
        """Return the TTFT; None if no token came out."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Return the TPOT; None if no token came out, 0 if only one did."""
        if not self.token_times_s:
            return None
        num_gaps = len(self.token_times_s) - 1
        return (self.token_times_s[-1] - self.token_times_s[0]) / num_gaps if num_gaps else 0.0

    @property
    def itl_s(self) -> tuple[float, ...]:
        """Return the gaps between tokens, one fewer than there are tokens."""
        return tuple(b - a for a, b in pairwise(self.token_times_s))

    @property
    def e2e_s(self) -> float | None:
        """Return the time from arrival to the last token if the request finished, else None."""
        if self.status is not RequestStatus.FINISHED or not self.token_times_s:
            return None
        return self.token_times_s[-1] - self.arrival_s


@dataclass(frozen=True, slots=True)
class StepRow:
    """One executed step, for timelines and for checking the latency model."""

    start_s: float
    duration_s: float
    predicted_s: float | None
    num_prefill_tokens: int
    num_decodes: int
    num_waiting: int
    num_running: int
    num_swapped: int
    kv_used_fraction: float
    num_rejected: int
    """Requests that were rejected in this step alone."""
