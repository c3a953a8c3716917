"""The requests that arrived last, which stand for those to come."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from slosched.core import DeadlineRule, Request, SchedulerView, latest_first
from slosched.policy.kit.stays import Stays
from slosched.policy.kit.steady import Steady

_NUM_ARRIVALS = 64
"""Latest arrivals that stand for those to come."""
_NUM_LONGER = 256
"""Latest arrivals that tell what lasts."""
_LEAST_ARRIVALS = 16
"""Arrivals before which nothing is said of those to come."""
_NEARLY_ALL = 0.75
"""Share of the arrivals whose promise is that of nearly all."""


class Arrival(NamedTuple):
    """What is kept of a request that has arrived."""

    arrival_s: float
    num_tokens: int
    """Tokens of its prompt that were to be computed when it arrived."""
    num_cached_tokens: int
    """Its others, which were in the KV cache."""
    tpot_s: float
    """The TPOT that it asks for; infinite if it asks for one token alone."""
    ttft_s: float
    is_best_effort: bool


class Arrivals:
    """The latest arrivals, their promises and lengths, and how many tokens requests emit."""

    def __init__(self) -> None:
        self.stays = Stays()
        self.latest: deque[Arrival] = deque(maxlen=_NUM_ARRIVALS)
        self.longer: deque[Arrival] = deque(maxlen=_NUM_LONGER)
        """The same and others before them, for what lasts."""
        self.num_seen = 0
        """Requests that have arrived so far."""

    def see(self, waiting: Sequence[Request]) -> Sequence[Request]:
        """Take in the requests that have arrived, and return them, the latest first.

        They came to wait after those that were seen before.  Their times do not tell: a server
        takes longer to read a long prompt, so that it is queued behind others that were sent later.
        """
        new: list[Request] = []
        for request in latest_first(waiting):
            if request.num_preemptions or self.stays.has_seen(request):
                break
            new.append(request)
        if new:
            self.num_seen += len(new)
            arrived = [_arrival(request) for request in reversed(new)]
            self.latest.extend(arrived)
            self.longer.extend(arrived)
            self.stays.watch(new)
        return new

    def span_s(self, now_s: float) -> float:
        """Return the time in which the latest came; 0 while they are too few to tell anything."""
        latest = self.latest
        return max(0.0, now_s - latest[0].arrival_s) if len(latest) >= _LEAST_ARRIVALS else 0.0

    def tokens_per_s(self, now_s: float) -> float:
        """Return the prompt tokens that have arrived lately in a second; 0 while that is unknown.

        They are those that were not cached when they arrived.
        """
        span_s = self.span_s(now_s)
        return sum([a.num_tokens for a in self.latest]) / span_s if span_s else 0.0

    @property
    def are_promises_alike(self) -> bool:
        """Tell whether nearly all of the latest ask for the same TPOT."""
        num_by_tpot_s = Counter(a.tpot_s for a in self.latest)
        return max(num_by_tpot_s.values(), default=0) >= _NEARLY_ALL * len(self.latest)

    def tpots_s(self) -> list[float]:
        """Return the TPOTs for which the latest ask, sorted."""
        return sorted({a.tpot_s for a in self.latest if a.tpot_s < math.inf})

    def lengths(self) -> list[int]:
        """Return the tokens of their prompts that were to be computed, sorted."""
        return sorted([a.num_tokens for a in self.latest])

    def steady(self, view: SchedulerView, prompt_tokens: float | None = None) -> Steady | None:
        """Return a stream of requests like these, of which as many end as start.

        Their mean prompt has so many tokens, or as many as that of all.  Returns None while few
        requests have ended, since what they emit is not known then.
        """
        output_tokens = self.stays.mean_of_latest()
        if not output_tokens:
            return None
        num, limits = len(self.latest), view.limits
        if prompt_tokens is None:
            prompt_tokens = sum([a.num_tokens for a in self.latest]) / num
        return Steady(
            max(1.0, prompt_tokens),
            output_tokens,
            view.model,
            limits.max_num_batched_tokens,
            has_long_steps=limits.deadline_rule is not DeadlineRule.TBT,
            cached_tokens=sum([a.num_cached_tokens for a in self.latest]) / num,
        )


def num_through(lengths: Iterable[int], tokens: float) -> int:
    """Return how many prompts, the shortest first, have no more than `tokens` together."""
    num = 0
    for length in lengths:
        tokens -= length
        if tokens < 0:
            break
        num += 1
    return num


def _arrival(request: Request) -> Arrival:
    slo = request.slo
    tpot_s = slo.tpot_s if request.max_tokens > 1 else math.inf
    num_tokens, num_cached = request.num_uncomputed_tokens, request.num_computed_tokens
    return Arrival(
        request.arrival_s, num_tokens, num_cached, tpot_s, slo.ttft_s, request.is_best_effort
    )
