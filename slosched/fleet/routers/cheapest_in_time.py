"""Cheapest in time: the replica that spends least on a request of those that keep its promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slosched.core import Request
from slosched.fleet.prefixes import SentPrefixes
from slosched.fleet.router import R, Router
from slosched.policy.kit.checks import check_positive_share


@dataclass
class CheapestInTime(Router):
    """Saves device time where the promise allows it, and keeps the promise where it does not.

    A replica is in time if it is expected to stay within the share `margin` of the promise.

    1. Of the replicas that are in time with TTFT and TPOT the one is taken on which the prefill
       takes the least device time: one that has cached more of the prompt, or a faster one.  Of
       equals, it is the one with the fewest requests.
    2. If there is none, it is the one with the least expected TPOT of those in time with TTFT.
    3. If there is none either, it is the one with the earliest expected first token.

    Source: ours.
    """

    needs_forecasts: ClassVar[bool] = True
    uses_prefixes: ClassVar[bool] = True

    margin: float = 0.5

    def __post_init__(self) -> None:
        check_positive_share(margin=self.margin)
        self.reset()

    def reset(self) -> None:
        self._prefixes = SentPrefixes()

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        slo, margin = request.slo, self.margin

        def rank(replica: R) -> tuple[int, float, int]:
            num_cached = self._prefixes.num_cached_tokens(request, replica)
            if (ttft_s := replica.expected_ttft_s(request, num_cached)) > margin * slo.ttft_s:
                return 2, ttft_s, 0
            if (tpot_s := replica.expected_tpot_s()) > margin * slo.tpot_s:
                return 1, tpot_s, 0
            return 0, replica.prefill_s(request, num_cached), replica.num_requests

        chosen = min(replicas, key=rank)
        self._prefixes.note(request, chosen)
        return chosen
