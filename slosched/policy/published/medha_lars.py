"""Medha's LARS: prompts by slack relative to the TTFT of their SLO, the least first."""

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
"""Largest share of a step that a long prompt leaves to others (`MAX_SPACE_SHARE_FRAC`)."""


@dataclass
class MedhaLARS(StallFree, ForeseesDecodes):
    """Every decode, then prompts by relative slack, in chunks cut to a target time of the step.

    Relative slack = (deadline - now - remaining prefill) / (deadline - arrival).  A long prompt
    with a long TTFT is as urgent as a short one with the same share of its time left, so it neither
    blocks short prompts nor is starved by them.

    A prompt with more than `long_tokens` computed tokens leaves a share of the step, its relative
    slack, to others (space sharing).  A step holds a chunk of only one such prompt.

    Source: Medha (arXiv 2409.17264), in the code of its authors' Vidur and Vajra:
    `_get_remaining_slack_fraction` → `_relative_slack`, `target_batch_time` → `step_s`,
    `long_request_kv_cache_len_threshold` → `long_tokens`, `MAX_SPACE_SHARE_FRAC` (0.5 in
    `st_replica_scheduler.py`) → `_MAX_SHARE_LEFT`.  There the TTFT is `deadline_multiplier`
    times the prefill's own time; here it is that of the request's SLO.  Left out: the parallelism
    (SPP, KVP), which needs many devices, and the tolerance of 10 % on the step's time.

    While the decodes alone take `step_s` or longer, no prompt gets a token, as in the authors' code
    (`get_max_chunk_size_for_seq`): prompts wait until enough decodes have ended.

    The policy uses no output lengths.
    """

    step_s: float = tunable(0.05, 0.02, 0.03, 0.1)
    """Predicted time of a step, in seconds, to which chunks are cut."""
    long_tokens: int = tunable(16_384, 4_096, 65_536)
    """Computed tokens from which on a prompt shares the step."""
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
            shares = set(long)
            before, after = order[:place], [i for i in order[place:] if i not in shares]
            self._add(batch, begun, [prefills[i] for i in before], self.step_s)
            self._add(batch, begun, [prefills[long[0]]], self.step_s * (1 - left))
            self._add(batch, begun, [prefills[i] for i in after], self.step_s)
        for i in order:  # if not even one token fits into the time, the first prompt runs
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
    """Return each prompt's slack minus the rest of its prefill, divided by its TTFT."""
    predict = model.predict_prefill
    return [
        (due_s - now_s - predict(r.num_tokens - (done := r.num_computed_tokens), done))
        / r.slo.ttft_s
        if (due_s := r.deadline_s) < math.inf
        else math.inf
        for r in prefills
    ]
