"""Predicted TTFT: the replica whose own latency model expects the first token the soonest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slosched.core import Request
from slosched.fleet.prefixes import SentPrefixes
from slosched.fleet.router import R, Router


@dataclass
class PredictedTTFT(Router):
    """Sends each request where its first token is expected first.

    Source: llm-d's routing by predicted latency.  There, trees that learn from finished requests
    predict; here, each replica's own latency model does.
    """

    needs_forecasts: ClassVar[bool] = True
    uses_prefixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._prefixes = SentPrefixes()

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        def ttft_s(replica: R) -> float:
            num_cached = self._prefixes.num_cached_tokens(request, replica)
            return replica.expected_ttft_s(request, num_cached)

        chosen = min(replicas, key=ttft_s)
        self._prefixes.note(request, chosen)
        return chosen
