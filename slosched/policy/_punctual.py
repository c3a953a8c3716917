"""Which prompts can have their first token in time, and in what order most of them do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import compress
from operator import attrgetter, not_
from typing import NamedTuple
from zlib import crc32

from slosched.batch import BatchBuilder
from slosched.core import EndReason, LatencyModel, Request

_MAX_ASKED = 256
"""Waiting prompts that a step looks at, the most urgent: a bound on its cost in deep overload."""


Timed = tuple[Request, float]
"""A prompt, and how long what is left of its prefill takes alone on the device."""


class Order(NamedTuple):
    """Prompts in the order in which they should run."""

    in_time: list[Request]
    """By deadline: if they run one after the other, none is late."""
    late: list[Request]
    """By deadline: those that have no time left beside the others."""


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


def are_in_time(ordered: Iterable[Timed], start_s: float, share: float) -> bool:
    """True if `ordered`, one after the other from `start_s` on, are in time.  O(n)."""
    for request, alone_s in ordered:
        start_s += alone_s / share
        if start_s > request.deadline_s:
            return False
    return True


def most_in_time(
    ordered: Sequence[Timed], start_s: float, share: float, fairness: float = 0.0
) -> Order:
    """Moore and Hodgson: of prompts in order of deadline, the most that can all be in time.

    They run one after the other from `start_s` on, with `share` of the device.  Whenever one would
    be late, the longest so far goes.  A share `fairness` of the requests, drawn by their names,
    goes only if no other is left, and then the one that takes longest for its length: at 0 every
    request counts the same, at 1 about every token, and between some of the long ones are safe.
    O(n log n).  Moore (1968), https://doi.org/10.1287/mnsc.15.1.102: exact for `fairness` 0.
    """
    # In the prefills' own time, which passes `share` times as fast.
    end_s = 0.0
    kept: list[tuple[bool, float, int]] = []
    is_late = [False] * len(ordered)
    for i, (request, alone_s) in enumerate(ordered):
        due_s = (request.deadline_s - start_s) * share
        is_safe = fairness > 0 and _draw(request) < fairness
        cost = alone_s / request.num_prompt_tokens if is_safe else alone_s
        heappush(kept, (is_safe, -cost, i))
        more_s = alone_s
        while end_s + more_s > due_s and kept:
            longest = heappop(kept)[-1]
            is_late[longest] = True
            more_s -= ordered[longest][1]
        end_s += more_s
    requests = [request for request, _ in ordered]
    return Order(list(compress(requests, map(not_, is_late))), list(compress(requests, is_late)))


def _draw(request: Request) -> float:
    """In [0, 1), the same in every step and in every process."""
    return crc32(request.request_id.encode()) / (1 << 32)
