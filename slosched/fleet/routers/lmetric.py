"""LMetric: the replica with the least product of prefill tokens and requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from slosched.core import Request
from slosched.fleet.prefixes import SentPrefixes
from slosched.fleet.router import R, Router


@dataclass
class LMetric(Router):
    """Multiplies what a replica would have to prefill by the requests that it has.

    The score of a replica is (tokens that wait for their prefill there + those of this prompt that
    it has not cached) * its requests.  Unlike a sum, a product needs no weights.  A replica without
    requests scores 0; of equal ones the one with the least to prefill is taken.

    Source: LMetric (arXiv 2603.15202), whose abstract defines the two factors.  That tokens which
    wait count to the first one is a reading.  Left out: the check for prompts so hot that the
    product fails, and events from the engines' caches; instead the router remembers what it has
    sent where (`SentPrefixes`).
    """

    uses_prefixes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._prefixes = SentPrefixes()

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        def score(replica: R) -> tuple[int, int]:
            num_new = request.num_prompt_tokens
            num_new -= self._prefixes.num_cached_tokens(request, replica)
            to_prefill = replica.num_waiting_tokens + num_new
            return to_prefill * replica.num_requests, to_prefill

        chosen = min(replicas, key=score)
        self._prefixes.note(request, chosen)
        return chosen
