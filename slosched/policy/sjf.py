"""Shortest job first, over prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from slosched.core import PromptOrder, Request, SchedulerView
from slosched.policy.kit.decode_first import DecodeFirst


@dataclass
class SJF(DecodeFirst):
    """Every decode, then the prompt with the fewest tokens left to compute, under a token budget.

    It serves the most requests when not all can be served, but long prompts starve: read its
    attainment by prompt length.  The job is the prefill, since output lengths are not known.
    """

    @property
    def prompt_order(self) -> PromptOrder:
        return PromptOrder.LENGTH

    def prefill_order(self, view: SchedulerView) -> Callable[[Request], float]:
        return attrgetter("num_uncomputed_tokens")
