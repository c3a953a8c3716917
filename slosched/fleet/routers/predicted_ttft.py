"""Predicted TTFT: the replica whose own latency model expects the first token the soonest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from slosched.core import Request
from slosched.fleet.prefix_router import PrefixRouter
from slosched.fleet.router import Replica


@dataclass
class PredictedTTFT(PrefixRouter):
    """Sends each request where its first token is expected first.

    Source: llm-d's routing by predicted latency.  There, trees that learn from finished requests
    predict; here, each replica's own latency model does.
    """

    needs_forecasts: ClassVar[bool] = True

    def cost(self, request: Request, replica: Replica, num_cached_tokens: int) -> float:
        return replica.expected_ttft_s(request, num_cached_tokens)
