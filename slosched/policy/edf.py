"""Earliest deadline first, over prompts."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from slosched.core import Policy, SchedulerOutput, SchedulerView
from slosched.policy._decode_first import check_token_budget, decodes_until_s, pack_decode_first
from slosched.policy._drop import Drop


@dataclass
class EDF(Policy):
    """Every decode, then the prompt whose first token is due soonest, under a token budget.

    Optimal while everything can be met; in overload it serves those that are nearly late first and
    drags the others with them, which is what `drop` is for.  Source: Sarathi-EDF as the QoServe
    paper (ASPLOS '26, arXiv 2503.22562) compares with.
    """

    token_budget: int = 512
    drop: Drop = Drop.NEVER

    def __post_init__(self) -> None:
        check_token_budget(self.token_budget)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return pack_decode_first(
            view,
            token_budget=self.token_budget,
            drop=self.drop,
            prefill_order=attrgetter("deadline_s"),
        )

    def decodes_until_s(self, view: SchedulerView) -> float:
        return decodes_until_s(view, self.token_budget)
