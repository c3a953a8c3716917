"""SLO bins: requests of equal TPOT share replicas, the busiest of which takes the next one."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slosched.core import Request
from slosched.fleet.router import R, Router
from slosched.policy.kit.checks import check_positive_share

_NUM_LATEST = 512
"""Number of latest requests whose tokens say how large a share of the fleet a tier needs."""


@dataclass
class SLOBins(Router):
    """Gives each tier of TPOT a part of the fleet, and fills up one replica after the other.

    1. A tier's part is its share of the prompt tokens of the latest requests; tight tiers come
       first in the fleet.
    2. Of the tier's replicas the one with the most requests is taken that is expected to stay
       within the share `margin` of the promised TTFT and TPOT.  (Steps of decodes with prompts
       among them take longer than the expected TPOT, which is that of decodes alone.)
    3. If there is none, the same is tried with the replicas of tighter tiers.
    4. If there is none either, the request goes to the one of its own tier with the earliest
       expected first token.

    Source: PolyServe (arXiv 2507.17769).  Left out: scaling the fleet, and chunks of a size that
    depends on the tier.
    """

    needs_forecasts: ClassVar[bool] = True

    margin: float = 0.5

    def __post_init__(self) -> None:
        check_positive_share(margin=self.margin)
        self.reset()

    def reset(self) -> None:
        self._latest: deque[tuple[float, int]] = deque()
        self._tokens: Counter[float] = Counter()

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        self._note(request.slo.tpot_s, request.num_prompt_tokens)
        first, end = self._part(request.slo.tpot_s, len(replicas))
        own, tighter = replicas[first:end], replicas[:first]
        keeping = self._keeping(request, own) or self._keeping(request, tighter)
        if keeping:
            return max(keeping, key=lambda replica: replica.num_requests)
        return min(own, key=lambda replica: replica.expected_ttft_s(request))

    def _note(self, tpot_s: float, num_tokens: int) -> None:
        self._latest.append((tpot_s, num_tokens))
        self._tokens[tpot_s] += num_tokens
        if len(self._latest) > _NUM_LATEST:
            oldest_s, num_oldest = self._latest.popleft()
            self._tokens[oldest_s] -= num_oldest
            if not self._tokens[oldest_s]:
                del self._tokens[oldest_s]

    def _part(self, tpot_s: float, num_replicas: int) -> tuple[int, int]:
        """Return the first replica of a tier and the one after its last; there is at least one."""
        total = sum(self._tokens.values())
        before = sum([num for other_s, num in self._tokens.items() if other_s < tpot_s])
        first = min(round(before / total * num_replicas), num_replicas - 1)
        end = round((before + self._tokens[tpot_s]) / total * num_replicas)
        return first, max(first + 1, end)

    def _keeping(self, request: Request, replicas: Sequence[R]) -> list[R]:
        """Return the replicas that are expected to keep the request's SLO."""
        ttft_s, tpot_s = self.margin * request.slo.ttft_s, self.margin * request.slo.tpot_s
        return [
            replica
            for replica in replicas
            if replica.expected_ttft_s(request) <= ttft_s and replica.expected_tpot_s() <= tpot_s
        ]
