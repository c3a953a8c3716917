"""Prefix affinity: the replica on which prefill and decode together have the least to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slosched.core import Request
from slosched.fleet.prefixes import SentPrefixes
from slosched.fleet.router import R, Router


@dataclass
class PrefixAffine(Router):
    """Weighs the tokens that a replica would have to prefill against those that it holds.

    The cost of a replica is overlap_weight * (tokens that wait for their prefill there + those of
    this prompt that it has not cached) + prompt tokens of all its requests with this one.

    Source: the KV router of NVIDIA Dynamo, whose design page defines these terms.  Left out: random
    choice by a temperature, and events from the engines' caches; instead the router remembers what
    it has sent where (`SentPrefixes`).
    """

    uses_prefixes: ClassVar[bool] = True

    overlap_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.overlap_weight < 0:
            raise ValueError(f"overlap_weight must not be negative: {self.overlap_weight}")
        self.reset()

    def reset(self) -> None:
        self._prefixes = SentPrefixes()

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        def cost(replica: R) -> float:
            num_new = request.num_prompt_tokens
            num_new -= self._prefixes.num_cached_tokens(request, replica)
            to_prefill = replica.num_waiting_tokens + num_new
            return self.overlap_weight * to_prefill + replica.num_prompt_tokens

        chosen = min(replicas, key=cost)
        self._prefixes.note(request, chosen)
        return chosen
