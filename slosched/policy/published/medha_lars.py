"""Medha's LARS: the prompt whose slack is least, as a share of the time it was promised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    ForeseesDecodes,
    LatencyModel,
    Limits,
    Request,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_at_least
from slosched.policy.kit.decode_first import StallFree, add_prefills, decodes_until_s
from slosched.policy.kit.drop import Drop

_MAX_SHARE_LEFT = 0.5
"""Of the step's time that a long prompt with slack may leave to others (`MAX_SPACE_SHARE_FRAC`)."""


@dataclass
class MedhaLARS(StallFree, ForeseesDecodes):
    """Every decode, then prompts by relative slack, in chunks cut to a time for the step.

    Relative slack = (deadline - now - remaining prefill) / (deadline - arrival): a long prompt
    that was promised much time counts as urgent when the same share of it is left as of a short
    one's, so neither does it block the short ones nor do they starve it.

    A prompt of more than `long_tokens` that has slack leaves that share of the step to others
    (space sharing), and a step holds a chunk of one such prompt only.

    Source: Medha (arXiv 2409.17264), in the code of its authors' Vidur and Vajra:
    `_get_remaining_slack_fraction` → `_relative_slack`, `target_batch_time` → `step_s`,
    `long_request_kv_cache_len_threshold` → `long_tokens`, `MAX_SPACE_SHARE_FRAC` (0.5 in
    `st_replica_scheduler.py`) → `_MAX_SHARE_LEFT`.  There the promise is `deadline_multiplier`
    times the prefill's own time; here it is the request's.  Left out: the parallelism (SPP, KVP),
    which is about many devices, and the tolerance of 10 % on the step's time.

    Needs nothing of output lengths.
    """

    step_s: float = tunable(0.05, 0.02, 0.03, 0.1)
    """Predicted time of a step, in seconds, that chunks are cut to."""
    long_tokens: int = tunable(16_384, 4_096, 65_536)
    """Prompt tokens computed from which a prompt shares the step."""
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise ValueError(f"step_s must be a positive number of seconds, not {self.step_s}")
        check_at_least(1, long_tokens=self.long_tokens)

    def add_prompts(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        begun: Sequence[Request],
        waiting: Sequence[Request],
        beside: DecodeGroup | None,
    ) -> None:
        prefills = (*begun, *waiting)
        slacks = _relative_slacks(prefills, view.now_s, view.model)
        order = sorted(range(len(prefills)), key=slacks.__getitem__)
        long = [i for i, r in enumerate(begun) if r.num_computed_tokens >= self.long_tokens]
        long.sort(key=slacks.__getitem__)
        if not long:
            self._add(batch, begun, [prefills[i] for i in order], self.step_s)
        else:
            place = order.index(long[0])
            left = min(max(slacks[long[0]], 0.0), _MAX_SHARE_LEFT)
            before, after = order[:place], [i for i in order[place:] if i not in long]
            self._add(batch, begun, [prefills[i] for i in before], self.step_s)
            self._add(batch, begun, [prefills[long[0]]], self.step_s * (1 - left))
            self._add(batch, begun, [prefills[i] for i in after], self.step_s)
        for i in order:  # a device on which nothing at all fits into the step
            if batch.shape.num_tokens:
                break
            self._add(batch, begun, [prefills[i]], math.inf)

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        return decodes_until_s(decodes, limits, limits.max_num_batched_tokens)

    def _add(
        self,
        batch: BatchBuilder,
        begun: Sequence[Request],
        prefills: Sequence[Request],
        limit_s: float,
    ) -> None:
        batch.time_limit_s = limit_s
        add_prefills(batch, prefills, reserved_blocks=batch.blocks_promised(begun))


def _relative_slacks(prefills: Sequence[Request], now_s: float, model: LatencyModel) -> list[float]:
    """Of each: what is left until its deadline beside its prefill, by what it was promised."""
    predict = model.predict_prefill
    return [
        (due_s - now_s - predict(r.num_tokens - (done := r.num_computed_tokens), done))
        / r.slo.ttft_s
        if (due_s := r.deadline_s) < math.inf
        else math.inf
        for r in prefills
    ]
