"""Earliest deadline first, over prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from slosched.core import PromptOrder, Request, SchedulerView
from slosched.policy.kit.decode_first import DecodeFirst


@dataclass
class EDF(DecodeFirst):
    """Every decode, then the prompt whose first token is due soonest, under a token budget.

    The order is optimal while all deadlines can be met.  In overload it serves those prompts first
    that are about to be late anyway, and makes the others late with them; `drop` prevents that.
    Best effort, and what is due much later, gives its seats and KV blocks to prompts that lack them
    (kit/make_way.py).
    Source: Sarathi-EDF, a baseline of the QoServe paper (ASPLOS '26, arXiv 2503.22562).
    """

    makes_way: ClassVar[bool] = True

    @property
    def prompt_order(self) -> PromptOrder:
        return PromptOrder.DEADLINE

    def prefill_order(self, view: SchedulerView) -> Callable[[Request], float]:
        return attrgetter("deadline_s")
