"""Sarathi-Serve: stall-free batches under a fixed token budget."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slosched.core import DecodeGroup, Limits, Policy, SchedulerOutput, SchedulerView, tunable
from slosched.policy._decode_first import (
    Packing,
    check_token_budget,
    decodes_until_s,
    pack_beside,
    pack_decode_first,
)
from slosched.policy._drop import Drop


@dataclass
class Sarathi(Policy):
    """Every decode, then prompts in order of arrival, cut so that a step stays in the budget.

    The budget is the one knob, and it has to be tuned: the largest with which a step full of
    decodes and one chunk still meets the TPOT promise.  Source: Sarathi-Serve (OSDI '24,
    arXiv 2403.02310), algorithm 3, `sarathi_scheduler.py`.
    """

    token_budget: int = tunable(512, 128, 256, 1024, 2048)
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_token_budget(self.token_budget)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return pack_decode_first(view, self._packing)

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        return pack_beside(decodes, view, self._packing)

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        return decodes_until_s(decodes, limits, self.token_budget)

    @cached_property
    def _packing(self) -> Packing:
        return Packing(self.token_budget, self.drop, prefill_order=None)
