"""Prompts that can have their first token in time, and the order in which most of them do."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heappushpop
from itertools import accumulate, compress
from operator import attrgetter, itemgetter, not_
from typing import NamedTuple
from zlib import crc32

from slosched.core import Request, RequestStatus, longest_tokens

MAX_ASKED = 256
"""Number of waiting prompts, the most urgent, that a step looks at, and of shorter ones at most.

It bounds the cost of a step in deep overload.
"""

_RUNNING = RequestStatus.RUNNING
"""A local name, because each attribute look-up on an enum takes 0.1 µs in Python 3.11."""

_FEW_LATE = 0.3
"""Late prompts per punctual prompt up to which the overload may be a burst that passes."""

Timed = tuple[Request, float]
"""A prompt, and the seconds that the rest of its prefill takes alone on the device."""

Rank = tuple[bool, float, int]
"""A prompt's rank: whether it is safe, minus its time (per token if it is safe), its place.

The prompt with the least rank is the first to be given up.
"""


class Order(NamedTuple):
    """Prompts in the order in which they should run, those that will be late apart."""

    in_time: list[Request]
    """Prompts of which none is late if they run by deadline, one after the other."""
    late: list[Request]
    """Prompts for which the others leave no time."""


class Supply(NamedTuple):
    """Time and seats that decodes leave for prompts.

    A seat is one of the `max_num_seqs` requests that may run at once.
    """

    start_s: float
    """Time at which the first prompt begins."""
    share: float = 1.0
    """Share of the device that prompts have."""
    num_free_seats: float = math.inf
    seat_s: float = 0.0
    """Time of steps of decodes alone until one more of them ends and leaves its seat."""

    def is_short_of_seats(self, in_time: Sequence[Request]) -> bool:
        """Tell whether decodes must run faster than their TPOTs ask, to leave seats in time."""
        if not in_time:
            return False
        left_s = in_time[-1].deadline_s - self.start_s
        num_started = sum(r.status is not _RUNNING for r in in_time)
        num_short = num_started - self.num_free_seats
        return num_short * self.seat_s > (1 - self.share) * left_s


def most_urgent(waiting: Sequence[Request]) -> Sequence[Request]:
    """Return the waiting prompts that are due first, at most 256 of them."""
    if len(waiting) <= MAX_ASKED:
        return waiting
    return sorted(waiting, key=attrgetter("deadline_s"))[:MAX_ASKED]


def most_urgent_of_short(
    waiting: Sequence[Request], now_s: float, tokens_per_s: float
) -> Sequence[Request]:
    """Return prompts to look at beside the `most_urgent`, which are those that are due next.

    If a step looked at all that wait, it would give up the longest for which `tokens_per_s` leave
    no time by the last deadline.  So in place of each of the `most_urgent` that is as long as
    these, it looks at a shorter one.  There are none if there is time for all.  O(n log n).
    """
    last_s = waiting[-1].deadline_s if waiting else math.inf
    most_tokens = longest_tokens(waiting) * len(waiting)
    if last_s < math.inf and most_tokens <= tokens_per_s * (last_s - now_s):
        return ()  # There is time for all, even if all were as long as the longest.
    pressing = [r for r in waiting if r.deadline_s < math.inf]
    if len(pressing) <= MAX_ASKED:
        return ()
    pressing.sort(key=attrgetter("deadline_s"))
    lengths = [r.num_prompt_tokens + r.num_output_tokens - r.num_computed_tokens for r in pressing]
    shortest_first = sorted(lengths)
    num_tokens = tokens_per_s * (pressing[-1].deadline_s - now_s)
    num_in_time = bisect_right(list(accumulate(shortest_first)), num_tokens)
    if num_in_time == len(lengths):
        return ()
    too_long = shortest_first[num_in_time]
    num_too_long = sum([n >= too_long for n in lengths[:MAX_ASKED]])
    others = zip(pressing[MAX_ASKED:], lengths[MAX_ASKED:], strict=True)
    return [request for request, n in others if n < too_long][:num_too_long]


def by_deadline(prefills: Iterable[Timed]) -> list[Timed]:
    """Return the prompts sorted by deadline."""
    return sorted(prefills, key=lambda timed: timed[0].deadline_s)


def are_in_time(ordered: Iterable[Timed], supply: Supply) -> bool:
    """Tell whether all of `ordered` are in time if they run one after the other.  O(n)."""
    start_s, share, num_free_seats, seat_s = supply
    prefill_s, num_short = 0.0, -num_free_seats
    for request, alone_s in ordered:
        left_s = request.deadline_s - start_s
        prefill_s += alone_s
        num_short += request.status is not _RUNNING
        if prefill_s > share * left_s or prefill_s + num_short * seat_s > left_s:
            return False
    return True


def best_order(
    ordered: Sequence[Timed], supply: Supply, fairness: float = 0.0, ageing: float = 0.0
) -> Order:
    """Return the most prompts that can be in time, by deadline or else by length.

    Prompts go by length if seats are scarce and many prompts are late.  A request is then in time
    for most of its stay once it has a seat, a short prompt takes least from others, and the
    prompts that arrive next are as short.  While a burst passes that would be wrong, since long
    prompts could have been in time, too.  `ordered` are sorted by deadline.
    """
    ranks = _ranks(ordered, supply.start_s, fairness, ageing)
    order = most_by_rank(ordered, supply, ranks)
    if len(order.late) <= _FEW_LATE * len(order.in_time):
        return order
    if not supply.is_short_of_seats(order.in_time):
        return order
    return _dearest_first(order, ordered, ranks, fairness)


def shortest_first(order: Order, ordered: Sequence[Timed], fairness: float = 0.0) -> Order:
    """Return the same prompts in time and the same late ones by length, the safe ones first.

    `ordered` are those of `order` with their times.
    """
    ranks = _ranks(ordered, 0.0, fairness, ageing=0.0)
    return _dearest_first(order, ordered, ranks, fairness)


def _dearest_first(
    order: Order, ordered: Sequence[Timed], ranks: Sequence[Rank], fairness: float
) -> Order:
    """Return the order with those first that would be given up last."""
    by_rank = itemgetter(0, 1) if fairness else itemgetter(1)  # None is safe: floats are faster.
    dearest_first = [ordered[at][0] for _, _, at in sorted(ranks, key=by_rank, reverse=True)]
    late = set(order.late)
    return Order(
        [r for r in dearest_first if r not in late], [r for r in dearest_first if r in late]
    )


def most_in_time(
    ordered: Sequence[Timed], supply: Supply, fairness: float = 0.0, ageing: float = 0.0
) -> Order:
    """Return the most prompts that can all be in time, by the rule of Moore and Hodgson.

    The prompts of `ordered`, which are sorted by deadline, run one after the other as the supply
    of time and seats allows.  Whenever one would be late, the longest so far is given up.

    A share `fairness` of the requests is safe: drawn by request id, they are given up only if no
    other is left, and then the one that takes longest for its length.  So at 0 every request
    counts the same, at 1 about every token, and in between some of the long requests are safe.

    With `ageing` a prompt counts as the shorter the longer it has waited: at 1 it counts as nothing
    when its first token is due, so that the newest prompts are given up and no longer the longest.

    O(n log n).  Source: Moore (1968), https://doi.org/10.1287/mnsc.15.1.102.  It is exact for
    `fairness` and `ageing` 0 while seats are free.  Where they are not, each prompt needs one seat,
    so that the longest prompt is the one to give up there, too.
    """
    return most_by_rank(ordered, supply, _ranks(ordered, supply.start_s, fairness, ageing))


def most_by_rank(ordered: Sequence[Timed], supply: Supply, ranks: Sequence[Rank]) -> Order:
    """Return the prompts that stay if, whenever one would be late, the least rank is given up.

    `ordered` are sorted by deadline; `ranks` are those of the same prompts in the same order.
    """
    # Written out in one loop, because this is most of a step's cost in overload.  While seats are
    # free `num_short` is below zero, and then the first of the two conditions is the stricter.
    start_s, share, num_free_seats, seat_s = supply
    prefill_s, num_short = 0.0, -num_free_seats
    requests = [request for request, _ in ordered]
    needs_seat = [request.status is not _RUNNING for request in requests]
    kept: list[Rank] = []
    is_late = [False] * len(ordered)
    for rank, (request, alone_s), takes_seat in zip(ranks, ordered, needs_seat, strict=True):
        left_s = request.deadline_s - start_s
        prefill_s += alone_s
        num_short += takes_seat
        if not (prefill_s > share * left_s or prefill_s + num_short * seat_s > left_s):
            heappush(kept, rank)
            continue
        given_up: Rank | None = heappushpop(kept, rank)
        while given_up is not None:
            longest = given_up[2]
            is_late[longest] = True
            prefill_s -= ordered[longest][1]
            num_short -= needs_seat[longest]
            is_over = prefill_s > share * left_s or prefill_s + num_short * seat_s > left_s
            given_up = heappop(kept) if is_over and kept else None
    return Order(list(compress(requests, map(not_, is_late))), list(compress(requests, is_late)))


def _ranks(ordered: Sequence[Timed], now_s: float, fairness: float, ageing: float) -> list[Rank]:
    """Return the rank of each prompt: by its time, or if it is safe by its time for a token."""
    costs_s = [alone_s for _, alone_s in ordered]
    if ageing:
        costs_s = [
            alone_s * (1 - ageing * _share_waited(request, now_s)) for request, alone_s in ordered
        ]
    if not fairness:
        return [(False, -cost_s, i) for i, cost_s in enumerate(costs_s)]
    return [
        (True, -cost_s / request.num_prompt_tokens, i)
        if _draw(request) < fairness
        else (False, -cost_s, i)
        for i, ((request, _), cost_s) in enumerate(zip(ordered, costs_s, strict=True))
    ]


def _share_waited(request: Request, now_s: float) -> float:
    """Return how much of the time from arrival to deadline is over, from 0 to 1."""
    waited_s = now_s - request.arrival_s
    return min(1.0, waited_s / max(waited_s, request.deadline_s - request.arrival_s, 1e-9))


def _draw(request: Request) -> float:
    """Return a number in [0, 1) that is the same in every step and in every process."""
    return crc32(request.request_id.encode()) / (1 << 32)
