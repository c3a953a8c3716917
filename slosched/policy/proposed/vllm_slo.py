"""vLLM's proposed `slo` policy: two TTFT targets, one for short and one for long prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from slosched.batch import BatchBuilder
from slosched.core import DecodeGroup, Request, SchedulerView, tunable
from slosched.policy.engines.vllm_v0.policy import SchedulingPolicy
from slosched.policy.engines.vllm_v1.admission import in_order
from slosched.policy.engines.vllm_v1.policy import VLLMV1
from slosched.policy.kit.checks import check_at_least

_BASE_S, _MIDDLE_S, _MOST_S = 20.0, 40.0, 120.0
"""The targets between which `priority_bias` moves."""
_MAX_BIAS = 10.0
_URGENCY_OF_TARGET, _URGENCY_OF_LENGTH = 200.0, 10.0
_PRESSING_SHARE = 0.6
"""The share of its target that a request waits before tokens are kept for it."""


@dataclass
class VLLMSLO(VLLMV1):
    """`vllm_v1`, in which waiting requests start by the share of their TTFT target that is over.

    The target is one of two, by the length of the prompt, and has nothing to do with the SLO of the
    request.  With `priority_bias=0` both are 20 s, so that the order is nearly that of arrival.
    Towards 10 the target of short prompts grows to 40 s and that of long ones to 120 s; below 0,
    long prompts are favoured instead.

    urgency = 200 · wait / target + 10 · (1 - prompt / max_model_len), without the first part once
    a token is out.  While at most half of the running requests decode, and a request has waited for
    60 % of its target, running requests leave as many tokens of the step as that prompt has, but at
    most `waiting_token_reserve_ratio` of all.

    Source: vLLM PR #53571 (2026-08-24) at faa6a94, `slo_policy.py`, `SLORequestQueue` and
    `scheduler.py`; options have the names of the PR without `slo_`.  Differences:

    * In the PR urgencies are computed anew when a request arrives or is preempted, and otherwise in
      every fourth step; here in every step.
    * Of equals, the first in the queue starts first; in the PR, the one with the first name does.
    """

    policy: SchedulingPolicy = field(default=SchedulingPolicy.FCFS, init=False, repr=False)
    priority_bias: float = tunable(0.0, 1.0, 3.0, 10.0)
    """How far the targets are apart, from -10 to 10; above 0 short prompts are favoured."""
    short_request_token_threshold: int = tunable(2048, 512, 8192)
    """Prompt tokens up to which a request is short."""
    waiting_token_reserve_ratio: float = 0.1
    """The share of a step's tokens that may be kept for a prompt that waits long; 0 for none."""
    max_model_len: int = 131_072
    """Tokens that the model can hold, over which the length of a prompt is weighed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not -_MAX_BIAS <= self.priority_bias <= _MAX_BIAS:
            raise ValueError(f"priority_bias must be in [-10, 10], not {self.priority_bias}")
        if not 0 <= self.waiting_token_reserve_ratio <= 1:
            raise ValueError(
                "waiting_token_reserve_ratio must be in [0, 1], not "
                f"{self.waiting_token_reserve_ratio}"
            )
        check_at_least(0, short_request_token_threshold=self.short_request_token_threshold)
        check_at_least(1, max_model_len=self.max_model_len)

    def target_s(self, num_prompt_tokens: int) -> float:
        """Return the TTFT target of a prompt, in seconds."""
        apart = abs(self.priority_bias)
        if apart <= 1:
            favoured_s, other_s = _BASE_S, _between(_BASE_S, _MIDDLE_S, apart)
        else:
            share = (apart - 1) / (_MAX_BIAS - 1)
            favoured_s = _between(_BASE_S, _MIDDLE_S, share)
            other_s = _between(_MIDDLE_S, _MOST_S, share)
        is_short = num_prompt_tokens <= self.short_request_token_threshold
        return favoured_s if is_short == (self.priority_bias >= 0) else other_s

    def urgency_at(self, now_s: float) -> Callable[[Request], float]:
        """Return the function that gives the urgency of a waiting request, the largest first."""
        most_short, most_tokens = self.short_request_token_threshold, self.max_model_len
        of_short = _URGENCY_OF_TARGET / self.target_s(most_short)
        of_long = _URGENCY_OF_TARGET / self.target_s(most_short + 1)
        of_token = _URGENCY_OF_LENGTH / most_tokens

        def urgency(request: Request) -> float:
            prompt = request.num_prompt_tokens
            bonus = _URGENCY_OF_LENGTH - of_token * min(prompt, most_tokens)
            if request.num_output_tokens:
                return bonus
            each_s = of_short if prompt <= most_short else of_long
            return bonus + each_s * max(now_s - request.arrival_s, 0)

        return urgency

    def waiting_in_order(self, view: SchedulerView) -> Iterable[Request]:
        urgency = self.urgency_at(view.now_s)
        return in_order(view.waiting, lambda r: (-urgency(r), r.arrival_s))

    def add_running(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        running: Sequence[Request],
        most_tokens: int | None,
    ) -> None:
        num_decodes = sum(r.is_decode for r in view.running)
        kept = self._kept_tokens(view, len(view.running), num_decodes)
        batch.num_free_tokens -= kept
        super().add_running(batch, view, running, most_tokens)
        batch.num_free_tokens += kept

    def add_running_beside(
        self,
        batch: BatchBuilder,
        decodes: DecodeGroup,
        view: SchedulerView,
        most_tokens: int | None,
    ) -> bool:
        num_decodes = decodes.num_decodes
        num_others = sum(r.is_decode for r in view.running)
        kept = self._kept_tokens(view, len(view.running) + num_decodes, num_decodes + num_others)
        batch.num_free_tokens -= kept
        has_room = super().add_running_beside(batch, decodes, view, most_tokens)
        batch.num_free_tokens += kept
        return has_room

    def _kept_tokens(self, view: SchedulerView, num_running: int, num_decodes: int) -> int:
        """Return the tokens of the step that running requests leave to those that wait."""
        most = view.limits.max_num_batched_tokens
        if not self.waiting_token_reserve_ratio or num_decodes > max(1, num_running // 2):
            return 0
        now_s, urgency = view.now_s, self.urgency_at(view.now_s)
        pressing = [
            (urgency(r), r.num_prompt_tokens)
            for r in view.waiting
            if not r.num_output_tokens
            and now_s - r.arrival_s >= _PRESSING_SHARE * self.target_s(r.num_prompt_tokens)
        ]
        if not pressing:
            return 0
        _, num_prompt_tokens = max(pressing)
        share = max(1, int(most * self.waiting_token_reserve_ratio))
        return min(num_prompt_tokens, share, most - 1)


def _between(low: float, high: float, share: float) -> float:
    """Return a value between two that leaves both with slope 0 (cubic smoothstep)."""
    return low + (high - low) * share * share * (3 - 2 * share)
