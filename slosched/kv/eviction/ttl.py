"""Time to live: a prefix is kept for a time that is worth its memory, then goes as in LRU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from slosched.core import Request
from slosched.kv.eviction.lines import Line
from slosched.kv.eviction.order import EvictionOrder, Known, PrefillCost, Rank, awaited
from slosched.kv.eviction.pauses import Pauses

_FEW_PAUSES = 32
"""Below this number of pauses they count as exponentially distributed."""
_FIRST_MEAN_S = 5.0
"""Mean pause before any was seen."""
_QUEUEING_WEIGHT = 0.05
"""Weight of a request in the running mean of the time in the queue."""


class TimeToLive(EvictionOrder):
    """Keeps what a request leaves for the time that pays, and evicts it afterwards as LRU does.

    The time is the t that maximizes P(pause <= t) * saved seconds - t * share of the KV cache.
    Saved are the device time to compute the prefix again and the mean time in the queue.
    P is the distribution of the last 512 pauses between turns, and exponential before there are 32.
    If everything idle is within its time, what would be evicted soonest goes first.

    Source: Continuum (arXiv 2511.02230), of which the abstracts of versions 1, 2 and 4 and public
    summaries were read, not its code.  From there are the form of the objective, the empirical
    distribution with an exponential one at the start, the queueing time as a part of the benefit,
    and that memory that is short ends a time early.  There, pauses are told apart by tool; here no
    tool is known.  The share of the cache as the price of memory is this file's own.  Continuum
    also serves programs first come, first served, which is the policy's affair, not the cache's.
    """

    def __init__(self, known: Known) -> None:
        """Begin without knowledge of pauses; raise ValueError without a latency model."""
        self._cost = PrefillCost(known, "ttl")
        self._num_blocks = known.num_blocks
        self._pauses = Pauses()
        self._queueing_s = 0.0

    def note_arrived(self, path: Sequence[Line], now_s: float) -> None:
        self._pauses.note_arrived(path, now_s)

    def note_ended(self, request: Request, path: Sequence[Line], now_s: float) -> None:  # noqa: ARG002
        if request.started_s is not None:
            queueing_s = request.started_s - request.arrival_s
            self._queueing_s += _QUEUEING_WEIGHT * (queueing_s - self._queueing_s)

    def rank(self, line: Line, now_s: float) -> Rank:
        if line.users:
            return awaited(line)
        expires_s = line.left_s + self._worthwhile_s(line)
        if expires_s <= now_s:
            return Rank((0.0, float(line.left_number)))
        return Rank((1.0, expires_s), until_s=expires_s)

    def _worthwhile_s(self, line: Line) -> float:
        """Return for how long a line is worth its memory, in seconds."""
        num_blocks = line.stop - line.start
        saved_s = num_blocks * self._cost.per_block_s(line.start, line.stop) + self._queueing_s
        share = num_blocks / self._num_blocks
        in_order_s = self._pauses.in_order_s
        if len(in_order_s) < _FEW_PAUSES:
            mean_s = (_FIRST_MEAN_S + sum(in_order_s)) / (1 + len(in_order_s))
            return mean_s * max(0.0, math.log(saved_s / (share * mean_s)))
        pauses_s = np.asarray(in_order_s)
        chance = np.arange(1, len(pauses_s) + 1) / len(pauses_s)
        gain_s = chance * saved_s - pauses_s * share
        best = int(np.argmax(gain_s))
        return float(pauses_s[best]) if gain_s[best] > 0 else 0.0
