"""Sarathi-Serve: stall-free batches under a fixed token budget."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.core import Policy, SchedulerOutput, SchedulerView
from slosched.policy._decode_first import (
    check_token_budget,
    decodes_until_s,
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

    token_budget: int = 512
    drop: Drop = Drop.NEVER

    def __post_init__(self) -> None:
        check_token_budget(self.token_budget)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return pack_decode_first(
            view, token_budget=self.token_budget, drop=self.drop, prefill_order=None
        )

    def decodes_until_s(self, view: SchedulerView) -> float:
        return decodes_until_s(view, self.token_budget)
