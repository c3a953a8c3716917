"""What is expected of a request when it arrives, and the quote that follows from it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from slosched.core import Request
from slosched.policy.kit.quotes.spread import Factors, SpreadByTTFT
from slosched.policy.kit.quotes.work import Work


class Quote(NamedTuple):
    """Quantiles of a request's TTFT and TPOT in seconds, by level (`LEVELS`)."""

    ttft_s: Mapping[float, float]
    tpot_s: Mapping[float, float]


@dataclass(slots=True, eq=False)
class Expected:
    """A request, what was expected of it when it arrived, and what is left of its prompt."""

    request: Request
    due_s: float
    """When its first token is due; infinite if it only gets what others leave over."""
    place: float
    """Its place in the policy's order, the least first."""
    num_tokens: int
    """Tokens that are left of its prompt."""
    work: Work
    """The rest of its prefill."""
    ttft_s: float
    ttft_spreads: SpreadByTTFT
    ttft_factors: Factors
    tpot_s: float
    tpot_factors: Factors
    ahead_s: float
    """Time that the prefills before it take in full steps."""
    in_time: float
    """The chance that its first token comes in time."""
    likely_s: float
    """Its TTFT in the mean of what is foreseen: later than promised if the chance is below half."""

    @property
    def quote(self) -> Quote:
        """Return the quantiles that follow from the expected values."""
        return Quote(
            {level: self.ttft_s * factor for level, factor in self.ttft_factors.items()},
            {level: self.tpot_s * factor for level, factor in self.tpot_factors.items()},
        )

    @classmethod
    def unjudged(
        cls, request: Request, work: Work, place: float, spreads: SpreadByTTFT
    ) -> Expected:
        """Return what is known of a request of which nothing was expected: `ttft_s` is 0."""
        return cls(
            request,
            first_due_s(request),
            place,
            request.num_uncomputed_tokens,
            work,
            ttft_s=0.0,
            ttft_spreads=spreads,
            ttft_factors={},
            tpot_s=0.0,
            tpot_factors={},
            ahead_s=0.0,
            in_time=1.0,
            likely_s=0.0,
        )


def first_due_s(request: Request) -> float:
    """Return when a first token is due: never if the request is served though late."""
    return math.inf if request.asked_slo is not None else request.arrival_s + request.slo.ttft_s
