"""Cheapest in time: the replica that spends least on a request of those that keep its promise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slosched.core import Request
from slosched.fleet.prefix_router import PrefixRouter
from slosched.fleet.router import Replica
from slosched.policy.kit.checks import check_positive_share


@dataclass
class CheapestInTime(PrefixRouter):
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

    margin: float = 0.5

    def __post_init__(self) -> None:
        check_positive_share(margin=self.margin)
        super().__post_init__()

    def cost(
        self, request: Request, replica: Replica, num_cached_tokens: int
    ) -> tuple[int, float, int]:
        slo, margin = request.slo, self.margin
        if (ttft_s := replica.expected_ttft_s(request, num_cached_tokens)) > margin * slo.ttft_s:
            return 2, ttft_s, 0
        if (tpot_s := replica.expected_tpot_s()) > margin * slo.tpot_s:
            return 1, tpot_s, 0
        return 0, replica.prefill_s(request, num_cached_tokens), replica.num_requests
