"""Least requests: the replica with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slosched.core import Request
from slosched.fleet.router import R, Router


@dataclass
class LeastRequests(Router):
    """Sends each request to the replica with the fewest that have not ended; ties to the first."""

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        return min(replicas, key=lambda replica: replica.num_requests)
