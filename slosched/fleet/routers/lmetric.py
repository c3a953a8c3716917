"""LMetric: the replica with the least product of prefill tokens and requests."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.core import Request
from slosched.fleet.prefix_router import PrefixRouter
from slosched.fleet.router import Replica


@dataclass
class LMetric(PrefixRouter):
    """Multiplies what a replica would have to prefill by the requests that it has.

    The score of a replica is (tokens that wait for their prefill there + those of this prompt that
    it has not cached) * its requests.  Unlike a sum, a product needs no weights.  A replica without
    requests scores 0; of equal ones the one with the least to prefill is taken.

    Source: LMetric (arXiv 2603.15202), whose abstract defines the two factors.  That tokens which
    wait count to the first one is a reading.  Left out: the check for prompts so hot that the
    product fails, and events from the engines' caches; instead the router remembers what it has
    sent where (`SentPrefixes`).
    """

    def cost(self, request: Request, replica: Replica, num_cached_tokens: int) -> tuple[int, int]:
        num_new = request.num_prompt_tokens - num_cached_tokens
        to_prefill = replica.num_waiting_tokens + num_new
        return to_prefill * replica.num_requests, to_prefill
