"""How many tokens a request emits until it ends, learnt from ended and unended ones."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from slosched.core import EndReason, Request

_NUM_ENDED = 64
"""Latest ended requests that stand for those to come."""
_NUM_LATEST = 256
"""Latest arrivals of which all count, whether they have ended or not."""
_LEAST_ENDED = 16
"""Ends of these from which on they say what the mean is."""
_FIRST_SWEEP = 64
"""Watched requests from which on those that have ended are looked for."""


class _Ended(NamedTuple):
    """What is kept of a request that has ended, whose prompt may have 100,000 tokens."""

    num_output_tokens: int
    end_reason: EndReason | None


class Stays:
    """The mean number of tokens that requests emit.

    Those that have ended alone would say too little, since short ones end first: after a start, or
    when longer ones begin to arrive.  So the tokens of those that go on count, too, and the mean is
    all emitted tokens for each request that has ended.  That is the most likely mean if a request
    that goes on ends with the same chance at each of its tokens.
    """

    def __init__(self) -> None:
        self._watched: dict[str, Request] = {}
        self._ended: deque[int] = deque(maxlen=_NUM_ENDED)
        self._sweep_at = _FIRST_SWEEP
        self._mean_tokens = 1.0
        self._taken_s = -math.inf
        """When the mean was taken."""
        self._latest: dict[str, Request | _Ended] = {}
        """The latest arrivals with a promise by request id, the earliest first: others make way."""

    def watch(self, arrived: Sequence[Request]) -> None:
        """Follow requests until they end."""
        if not arrived:
            return
        self._watched.update((request.request_id, request) for request in arrived)
        self._latest.update((r.request_id, r) for r in reversed(arrived) if not r.is_best_effort)
        for request_id in list(islice(self._latest, max(0, len(self._latest) - _NUM_LATEST))):
            del self._latest[request_id]
        if len(self._watched) >= self._sweep_at:
            self._sweep()
            self._sweep_at = max(_FIRST_SWEEP, 2 * len(self._watched))

    def has_seen(self, request: Request) -> bool:
        """Tell whether a request that has not ended is followed."""
        return self._watched.get(request.request_id) is request

    def mean_tokens(self, now_s: float) -> float:
        """Return the mean; at least 1.  One request counts as ended before any has.  O(n).

        All running requests have to be up to date, as they are while `schedule` plans: what is
        said must not depend on the steps that were planned beside a group, which do not ask.
        """
        if now_s != self._taken_s:
            self._taken_s = now_s
            self._sweep()
            emitted = sum(self._ended) + sum([r.num_output_tokens for r in self._watched.values()])
            self._mean_tokens = max(1.0, emitted / (len(self._ended) + 1))
        return self._mean_tokens

    def mean_of_latest(self) -> float:
        """Return the mean of the latest arrivals; 0 while few of them have ended.  O(n).

        In a stream that goes on as it is `mean_tokens` is too large, since it counts the tokens of
        all that run, but few of those that have ended.
        """
        num_tokens = num_ended = 0
        for request in self._latest.values():
            if request.num_output_tokens:
                num_tokens += request.num_output_tokens
                num_ended += request.end_reason is not None
        return num_tokens / num_ended if num_ended >= _LEAST_ENDED else 0.0

    def lengths(self) -> list[int]:
        """Return the tokens of those of the latest arrivals that have ended, sorted.

        The list is empty while few of them have.  O(n log n).
        """
        ended = [
            r for r in self._latest.values() if r.end_reason is not None and r.num_output_tokens
        ]
        return sorted([r.num_output_tokens for r in ended]) if len(ended) >= _LEAST_ENDED else []

    def _sweep(self) -> None:
        """Learn from the requests that have ended, and forget them; the rejected emitted none.

        They count in the order of their ends, however often this is called.
        """
        ended = [r for r in self._watched.values() if r.end_reason is not None]
        for request in sorted(ended, key=attrgetter("end_s")):
            del self._watched[request.request_id]
            if request.request_id in self._latest:
                self._latest[request.request_id] = _Ended(
                    request.num_output_tokens, request.end_reason
                )
            if request.num_output_tokens:
                self._ended.append(request.num_output_tokens)
