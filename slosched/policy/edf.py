"""Earliest deadline first, over prompts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

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
class EDF(Policy):
    """Every decode, then the prompt whose first token is due soonest, under a token budget.

    Optimal while everything can be met; in overload it serves those that are nearly late first and
    drags the others with them, which is what `drop` is for.  Source: Sarathi-EDF as the QoServe
    paper (ASPLOS '26, arXiv 2503.22562) compares with.
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
        return Packing(self.token_budget, self.drop, prefill_order=attrgetter("deadline_s"))
