"""Which prompts can have their first token in time, and in what order most of them do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import compress
from operator import attrgetter, not_
from typing import NamedTuple
from zlib import crc32

from slosched.batch import BatchBuilder
from slosched.core import EndReason, LatencyModel, Request, RequestStatus

_MAX_ASKED = 256
"""Waiting prompts that a step looks at, the most urgent: a bound on its cost in deep overload."""


_RUNNING = RequestStatus.RUNNING
"""A look at an enum's member takes 0.1 µs in Python 3.11, and hundreds are asked in a step."""


_FEW_LATE = 0.3
"""Late prompts for each punctual one: no more, and it may be a burst that passes."""


Timed = tuple[Request, float]
"""A prompt, and how long what is left of its prefill takes alone on the device."""


Rank = tuple[bool, float, int]
"""Whether a prompt is safe, less what it takes from others, its place: the least is given up."""


class Order(NamedTuple):
    """Prompts in the order in which they should run."""

    in_time: list[Request]
    """By deadline: if they run one after the other, none is late."""
    late: list[Request]
    """By deadline: those that have no time left beside the others."""


class Supply(NamedTuple):
    """What decodes leave for prompts: time, and seats, of which there are `max_num_seqs`."""

    start_s: float
    """When the prompts begin."""
    share: float = 1.0
    """Of the device, if decodes keep the pace of their TPOTs."""
    num_free_seats: float = math.inf
    seat_s: float = 0.0
    """Time of decodes alone until one more of them ends and leaves its seat."""

    def is_short_of_seats(self, in_time: Sequence[Request]) -> bool:
        """True if decodes have to run faster than their TPOTs ask, to leave theirs in time."""
        if not in_time:
            return False
        left_s = in_time[-1].deadline_s - self.start_s
        num_started = sum(r.status is not _RUNNING for r in in_time)
        num_short = num_started - self.num_free_seats
        return num_short * self.seat_s > (1 - self.share) * left_s


def most_urgent(waiting: Sequence[Request]) -> Sequence[Request]:
    if len(waiting) <= _MAX_ASKED:
        return waiting
    return sorted(waiting, key=attrgetter("deadline_s"))[:_MAX_ASKED]


def reject_hopeless(
    batch: BatchBuilder, model: LatencyModel, prefills: Iterable[Request], now_s: float
) -> list[Timed]:
    """Refuse prompts that would miss their TTFT even alone on the device; the others, timed."""
    predict = model.predict_prefill
    timed = []
    for request in prefills:
        out, computed = request.num_output_tokens, request.num_computed_tokens
        alone_s = predict(request.num_prompt_tokens + out - computed, computed)
        slack_s = request.deadline_s - now_s
        if alone_s <= slack_s or out:
            timed.append((request, alone_s))
        else:
            reason = EndReason.EXPIRED if slack_s < 0 else EndReason.INFEASIBLE
            batch.reject(request, reason)
    return timed


def by_deadline(prefills: Iterable[Timed]) -> list[Timed]:
    return sorted(prefills, key=lambda timed: timed[0].deadline_s)


def are_in_time(ordered: Iterable[Timed], supply: Supply) -> bool:
    """True if `ordered`, one after the other, are in time.  O(n)."""
    start_s, share, num_free_seats, seat_s = supply
    prefill_s, num_short = 0.0, -num_free_seats
    for request, alone_s in ordered:
        left_s = request.deadline_s - start_s
        prefill_s += alone_s
        num_short += request.status is not _RUNNING
        if prefill_s > share * left_s or prefill_s + num_short * seat_s > left_s:
            return False
    return True


def best_order(ordered: Sequence[Timed], supply: Supply, fairness: float = 0.0) -> Order:
    """The most that can be in time, by deadline; if seats are what is scarce for long, by length.

    Who has a seat then is in time for most of its stay: a short prompt takes least from others,
    and those that arrive next are as short.  While a burst passes that would be wrong: the long
    ones could have been in time, too.
    """
    order = most_in_time(ordered, supply, fairness)
    if len(order.late) <= _FEW_LATE * len(order.in_time):
        return order
    if not supply.is_short_of_seats(order.in_time):
        return order
    ranks = _ranks(ordered, fairness)
    rank = {r.request_id: rank[:2] for rank, (r, _) in zip(ranks, ordered, strict=True)}

    def last_given_up(requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda r: rank[r.request_id], reverse=True)

    return Order(last_given_up(order.in_time), last_given_up(order.late))


def most_in_time(ordered: Sequence[Timed], supply: Supply, fairness: float = 0.0) -> Order:
    """Moore and Hodgson: of prompts in order of deadline, the most that can all be in time.

    They run one after the other, as the supply of time and seats allows.  Whenever one would be
    late, the longest so far goes.  A share `fairness` of the requests, drawn by their names,
    goes only if no other is left, and then the one that takes longest for its length: at 0 every
    request counts the same, at 1 about every token, and between some of the long ones are safe.
    O(n log n).  Moore (1968), https://doi.org/10.1287/mnsc.15.1.102: exact for `fairness` 0 while
    seats are free; each prompt needs one, so that the longest is the one to give up there, too.
    """
    return most_by_rank(ordered, supply, _ranks(ordered, fairness))


def most_by_rank(ordered: Sequence[Timed], supply: Supply, ranks: Sequence[Rank]) -> Order:
    """Of prompts in order of deadline, those left once, whenever one is late, the least rank goes.

    `ranks` are of the same prompts in the same order.
    """
    # Written out, for it is what a step costs in overload.  While seats are free `num_short` is
    # below zero, and then the other condition is the stricter one.
    start_s, share, num_free_seats, seat_s = supply
    prefill_s, num_short = 0.0, -num_free_seats
    needs_seat = [request.status is not _RUNNING for request, _ in ordered]
    kept: list[Rank] = []
    is_late = [False] * len(ordered)
    for rank, (request, alone_s) in zip(ranks, ordered, strict=True):
        left_s = request.deadline_s - start_s
        heappush(kept, rank)
        prefill_s += alone_s
        num_short += needs_seat[rank[2]]
        while kept and (prefill_s > share * left_s or prefill_s + num_short * seat_s > left_s):
            longest = heappop(kept)[2]
            is_late[longest] = True
            prefill_s -= ordered[longest][1]
            num_short -= needs_seat[longest]
    requests = [request for request, _ in ordered]
    return Order(list(compress(requests, map(not_, is_late))), list(compress(requests, is_late)))


def _ranks(ordered: Sequence[Timed], fairness: float) -> list[Rank]:
    """By what each prefill takes from others, and its place: the least is given up first."""
    if not fairness:
        return [(False, -alone_s, i) for i, (_, alone_s) in enumerate(ordered)]
    return [
        (True, -alone_s / request.num_prompt_tokens, i)
        if _draw(request) < fairness
        else (False, -alone_s, i)
        for i, (request, alone_s) in enumerate(ordered)
    ]


def _draw(request: Request) -> float:
    """In [0, 1), the same in every step and in every process."""
    return crc32(request.request_id.encode()) / (1 << 32)
