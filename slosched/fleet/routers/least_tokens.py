"""Least tokens: the replica with the fewest prompt tokens in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slosched.core import Request
from slosched.fleet.router import R, Router


@dataclass
class LeastTokens(Router):
    """Sends each request to the replica whose unfinished requests have the fewest prompt tokens."""

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        return min(replicas, key=lambda replica: replica.num_prompt_tokens)
