"""Round robin: the replicas take turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from slosched.core import Request
from slosched.fleet.router import IntArray, R, Router


@dataclass
class RoundRobin(Router):
    """Sends the n-th request to replica n modulo their number; it looks at none of them."""

    def __post_init__(self) -> None:
        self._num_routed = 0

    def places(self, num_requests: int, num_replicas: int) -> IntArray:
        return np.arange(num_requests, dtype=np.int64) % num_replicas

    def reset(self) -> None:
        self._num_routed = 0

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        self._num_routed += 1
        return replicas[(self._num_routed - 1) % len(replicas)]
