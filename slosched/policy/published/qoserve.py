"""QoServe (Niyama): chunks as large as the decodes' slack allows, hopeless prompts last."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from slosched.batch import BatchBuilder, largest_that_fits
from slosched.core import (
    DeadlineRule,
    DecodeGroup,
    ForeseesDecodes,
    Limits,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_at_least, check_positive
from slosched.policy.kit.decode_first import StallFree, add_prefills, decodes_until_s
from slosched.policy.kit.drop import Drop

_LEAST_STEP_TOKENS = 128
_SCARCE_STEP_TOKENS = 512
_RATE_MEMORY = 0.995
"""Weight of the past in the running mean of the prefill rate, each step."""


@dataclass
class QoServe(StallFree, ForeseesDecodes):
    """Every decode, then as many prompt tokens as the slack of the most urgent decode allows.

    1. Dynamic chunking: a step holds the largest number of tokens on a grid (128, 256, 512, …,
       `max_step_tokens`) whose predicted time, times `safety`, is within the smallest slack of the
       decodes, or 128 if none is.  All prompt tokens are predicted as a chunk of the first prompt.
    2. Hybrid prioritization: prompts in order of deadline + `alpha_s_per_token` · tokens left.
       With 0 this is earliest deadline first; with a large value it is shortest prefill first.
    3. Eager relegation: a prompt is hopeless if it has not begun and would be late even if the
       device computed nothing else, at the recent prefill rate.  It goes last from then on.

    Source: QoServe, formerly Niyama (ASPLOS '26, arXiv 2503.22562); its code, branch
    `niyama_asplos2026` of microsoft/sarathi-serve at 72339db: `deadline_scheduler.py`,
    `sequence.py`.  There the fields are `hybrid_prioritization_param`, `pred_thres`, the end of
    `TOKEN_SEARCH_SPACE`, `expected_prefill_throughput`, and 1,000 · 32 free tokens for
    `LOW_MEMORY_TOKEN_SEARCH_SPACE`.

    Differences: the run's latency model predicts, not a random forest or the code's linear fit.
    Deadlines are those of the run's `DeadlineRule`, but under `envelope` tokens are counted from
    the true time of the first one if that was late, as in the code, which does so under any rule
    and one TBT later than the paper's equation.  KV blocks
    are kept for prompts that have begun, and decodes are preempted when blocks run out, where the
    code fails.  Left out: tiers with only an end-to-end deadline, for which the code assumes 15
    output tokens.  QoServe has no `drop`; it is here so that all policies can be compared with the
    same options.

    The policy uses no output lengths.
    """

    alpha_s_per_token: float = tunable(0.008, 0.0, 0.001, 0.03)
    """Seconds that each token left to compute adds to the deadline by which prompts are sorted."""
    safety: float = tunable(1.2, 1.0, 1.1)
    """Factor on predicted times."""
    max_step_tokens: int = tunable(2552, 4096, 8192)
    """The largest step, where slack allows; `max_num_batched_tokens` may cut it further."""
    relegate: bool = True
    scarce_kv_tokens: int = 32_000
    """Free tokens of the KV cache below which a step holds at most 512 tokens."""
    prefill_tokens_per_s: float = 8500.0
    """The prefill rate assumed at the start."""
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_at_least(
            0, alpha_s_per_token=self.alpha_s_per_token, scarce_kv_tokens=self.scarce_kv_tokens
        )
        check_positive(safety=self.safety, prefill_tokens_per_s=self.prefill_tokens_per_s)
        check_at_least(_LEAST_STEP_TOKENS, max_step_tokens=self.max_step_tokens)
        self.reset()

    def reset(self) -> None:
        self._rate_tokens_per_s = self.prefill_tokens_per_s
        self._last_step_s = 0.0
        self._last_prefill_tokens = 0
        self._relegated: set[str] = set()

    def new_batch(self, view: SchedulerView, beside: DecodeGroup | None = None) -> BatchBuilder:
        had_work = bool(view.running or view.swapped or beside) or any(
            request.arrival_s <= self._last_step_s for request in view.waiting
        )
        self._observe(view.now_s, is_timed=had_work and not view.follows_another)
        return super().new_batch(view, beside)

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return minus infinity while the prefill rate of the last step has yet to be observed."""
        if self._last_prefill_tokens:
            return -math.inf
        return decodes_until_s(decodes, limits, limits.max_num_batched_tokens)

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Return None under the rule `envelope` if there are prompts: see `_due_s`."""
        is_envelope = view.limits.deadline_rule is DeadlineRule.ENVELOPE
        if is_envelope and (view.running or view.waiting):
            return None
        return super().schedule_beside(decodes, view)

    def _observe(self, now_s: float, *, is_timed: bool) -> None:
        """Update the prefill rate from the last step, which has ended, if it computed prefills.

        Unless it `is_timed`, the device has been idle since, or has run steps of another policy.
        """
        if self._last_prefill_tokens and is_timed and now_s > self._last_step_s:
            seen = self._last_prefill_tokens / (now_s - self._last_step_s)
            self._rate_tokens_per_s += (1 - _RATE_MEMORY) * (seen - self._rate_tokens_per_s)
        self._last_prefill_tokens = 0
        self._last_step_s = now_s

    def add_prompts(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        begun: Sequence[Request],
        waiting: Sequence[Request],
        beside: DecodeGroup | None,
    ) -> None:
        if self._relegated:
            self._relegated &= {r.request_id for r in (*begun, *view.swapped, *view.waiting)}
        prefills = sorted((*begun, *waiting), key=self._urgency)
        if not prefills:
            return
        slack_s = _first_due_s(view, beside) - view.now_s
        step_tokens = self._step_tokens(batch, view, slack_s, prefills[0].num_computed_tokens)
        num_decodes = batch.shape.num_tokens
        batch.num_free_tokens = min(batch.num_free_tokens, step_tokens - num_decodes)
        in_order = self._hopeless_last(prefills, view.now_s)
        add_prefills(batch, in_order, reserved_blocks=batch.blocks_promised(begun))
        self._last_prefill_tokens = batch.shape.num_tokens - num_decodes

    def _urgency(self, request: Request) -> float:
        """Return what prompts are sorted by (hybrid prioritization)."""
        return request.deadline_s + self.alpha_s_per_token * (
            request.num_prompt_tokens + request.num_output_tokens - request.num_computed_tokens
        )

    def _hopeless_last(self, prefills: Iterable[Request], now_s: float) -> Iterator[Request]:
        """Yield the prompts, the relegated ones last.

        Each is judged only when it is its turn, since a step has room for few.
        """
        last = []
        for request in prefills:
            if request.request_id in self._relegated:
                last.append(request)
            elif self.relegate and self._is_hopeless(request, now_s):
                self._relegated.add(request.request_id)
                last.append(request)
            else:
                yield request
        yield from last

    def _is_hopeless(self, request: Request, now_s: float) -> bool:
        if request.status is not RequestStatus.WAITING or request.num_output_tokens:
            return False
        needed_s = request.num_uncomputed_tokens / self._rate_tokens_per_s
        return now_s + needed_s > request.deadline_s

    def _step_tokens(
        self, batch: BatchBuilder, view: SchedulerView, slack_s: float, num_prior_tokens: int
    ) -> int:
        """Return the tokens of the step, its decodes included (dynamic chunking)."""
        model, shape = view.model, batch.shape
        sizes = self._grid(batch.num_free_blocks * view.kv.block_size < self.scarce_kv_tokens)

        def fits(i: int) -> bool:
            chunk = sizes[i] - shape.num_tokens
            if chunk <= 0:  # there are more decodes than that
                return self.safety * model.predict(shape) <= slack_s
            return self.safety * batch.predict_with(chunk, num_prior_tokens) <= slack_s

        return sizes[largest_that_fits(fits, 0, len(sizes))]  # the first even if it does not fit

    def _grid(self, kv_is_scarce: bool) -> list[int]:
        step, most = (128, _SCARCE_STEP_TOKENS) if kv_is_scarce else (256, self.max_step_tokens)
        most = min(most, self.max_step_tokens)
        return [_LEAST_STEP_TOKENS, *range(256, most, step), most]


def _first_due_s(view: SchedulerView, beside: DecodeGroup | None) -> float:
    """Return when the first token of the decodes is due."""
    if beside is not None:
        return beside.first_deadline_s
    decodes = (r for r in view.running if r.is_decode)
    if view.limits.deadline_rule is DeadlineRule.ENVELOPE:
        return min(map(_due_s, decodes), default=math.inf)
    return min((r.deadline_s for r in decodes), default=math.inf)


def _due_s(decode: Request) -> float:
    """Return when its next token is due under `envelope`, counted from the first if that was late.

    Else one late first token would leave no slack to steps until the answer has caught up.
    """
    if not decode.num_output_tokens:
        return decode.deadline_s
    first_s = decode.token_times_s[0]
    return max(decode.deadline_s, first_s + decode.num_output_tokens * decode.slo.tpot_s)
