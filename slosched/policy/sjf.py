"""Shortest job first, over prompts."""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter

from slosched.core import Policy, SchedulerOutput, SchedulerView
from slosched.policy._decode_first import check_token_budget, decodes_until_s, pack_decode_first
from slosched.policy._drop import Drop


@dataclass
class SJF(Policy):
    """Every decode, then the prompt with the least left to compute, under a token budget.

    Serves the most requests when not all can be served, and starves long prompts to do so: read
    its attainment by prompt length.  The job is the prefill, since output lengths are not known.
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
            prefill_order=attrgetter("num_uncomputed_tokens"),
        )

    def decodes_until_s(self, view: SchedulerView) -> float:
        return decodes_until_s(view, self.token_budget)
