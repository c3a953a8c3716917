"""Cheapest in time: the replica that spends least on a request of those that keep its promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slosched.core import Request
from slosched.fleet.prefixes import SentPrefixes
from slosched.fleet.router import Router
from slosched.fleet.view import ReplicaView


@dataclass
class CheapestInTime(Router):
    """Saves device time where the promise allows it, and keeps the promise where it does not.

    1. A replica is in time if it is expected to stay within the share `margin` of the promised TTFT
       and TPOT.
    2. Of those in time the one is taken on which the prefill takes the least device time: one that
       has cached more of the prompt, or a faster one.  Of equals, it is the one with the fewest
       requests.
    3. If none is in time, the one with the earliest expected first token is taken.

    Source: ours.
    """

    margin: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 1:
            raise ValueError(f"margin must be a share in (0, 1], not {self.margin}")
        self.reset()

    def reset(self) -> None:
        self._prefixes = SentPrefixes()

    def route(self, request: Request, replicas: Sequence[ReplicaView]) -> ReplicaView:
        def rank(replica: ReplicaView) -> tuple[bool, float, int]:
            num_cached = self._prefixes.num_cached_tokens(request, replica)
            ttft_s = replica.expected_ttft_s(request, num_cached)
            is_slow = replica.expected_tpot_s() > self.margin * request.slo.tpot_s
            if is_slow or ttft_s > self.margin * request.slo.ttft_s:
                return True, ttft_s, 0
            return False, replica.prefill_s(request, num_cached), replica.num_requests

        chosen = min(replicas, key=rank)
        self._prefixes.note(request, chosen)
        return chosen
