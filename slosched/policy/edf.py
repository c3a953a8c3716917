"""Earliest deadline first, over prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from slosched.core import Request
from slosched.policy.kit.decode_first import DecodeFirst


@dataclass
class EDF(DecodeFirst):
    """Every decode, then the prompt whose first token is due soonest, under a token budget.

    Optimal while everything can be met; in overload it serves those that are nearly late first and
    drags the others with them, which is what `drop` is for.  Source: Sarathi-EDF as the QoServe
    paper (ASPLOS '26, arXiv 2503.22562) compares with.
    """

    def prefill_order(self) -> Callable[[Request], float]:
        return attrgetter("deadline_s")
