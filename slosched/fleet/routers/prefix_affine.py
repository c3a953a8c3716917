"""Prefix affinity: the replica on which prefill and decode together have the least to do."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.core import Request
from slosched.fleet.prefix_router import PrefixRouter
from slosched.fleet.router import Replica


@dataclass
class PrefixAffine(PrefixRouter):
    """Weighs the tokens that a replica would have to prefill against those that it holds.

    The cost of a replica is overlap_weight * (tokens that wait for their prefill there + those of
    this prompt that it has not cached) + prompt tokens of all its requests with this one.

    Source: the KV router of NVIDIA Dynamo, whose design page defines these terms.  Left out: random
    choice by a temperature, and events from the engines' caches; instead the router remembers what
    it has sent where (`SentPrefixes`).
    """

    overlap_weight: float = 1.0

    def __post_init__(self) -> None:
        if self.overlap_weight < 0:
            raise ValueError(f"overlap_weight must not be negative: {self.overlap_weight}")
        super().__post_init__()

    def cost(self, request: Request, replica: Replica, num_cached_tokens: int) -> float:
        num_new = request.num_prompt_tokens - num_cached_tokens
        to_prefill = replica.num_waiting_tokens + num_new
        return self.overlap_weight * to_prefill + replica.num_prompt_tokens
