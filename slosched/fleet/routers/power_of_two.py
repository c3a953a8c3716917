"""The power of two choices: the less loaded of two replicas that are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from slosched.core import Request
from slosched.fleet.router import R, Router


@dataclass
class PowerOfTwo(Router):
    """Draws `num_choices` replicas, and takes the one with the fewest requests in flight.

    Source: Mitzenmacher, "The power of two choices in randomized load balancing", IEEE TPDS 2001.
    """

    num_choices: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_choices < 1:
            raise ValueError(f"num_choices must be at least 1, not {self.num_choices}")
        self.reset()

    def reset(self) -> None:
        self._random = random.Random(self.seed)

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        drawn = self._random.sample(replicas, min(self.num_choices, len(replicas)))
        return min(drawn, key=lambda replica: replica.num_requests)
