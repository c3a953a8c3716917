"""Keeps what is likely to save the most device time for its memory."""

from __future__ import annotations

from collections.abc import Sequence

from slosched.core import Request
from slosched.kv.eviction.life_table import LifeTable
from slosched.kv.eviction.lines import Line
from slosched.kv.eviction.order import EvictionOrder, Known, PrefillCost, Rank, awaited


class SavedTime(EvictionOrder):
    """Evicts first what saves the least device time for each block and second that it stays.

    That is the rate at which lines of this age and pace return (`LifeTable`), times the device time
    that a return saves for each block, by the latency model.  Attention makes the later blocks of a
    prompt the dearer ones.  What a request waits for stays longest, the first in the queue last.

    It knows a session by its prefix: a turn that begins with all of the last one's prompt continues
    it.  So clients need not name their sessions, and documents and system prompts are treated
    alike.  The order is slosched's own.
    """

    def __init__(self, known: Known) -> None:
        """Begin without knowledge of returns; raise ValueError without a latency model."""
        self._cost = PrefillCost(known, "saved_time")
        self._returns = LifeTable()

    def note_arrived(self, path: Sequence[Line], now_s: float) -> None:
        self._returns.advance(now_s)
        for line in path:
            if not line.users:
                self._returns.come_back(line, now_s)

    def note_ended(self, request: Request, path: Sequence[Line], now_s: float) -> None:  # noqa: ARG002
        self._returns.advance(now_s)
        for line in path:
            if not line.users:
                self._returns.leave(line, now_s)

    def rank(self, line: Line, now_s: float) -> Rank:
        if line.users:
            return awaited(line)
        rate, until_s = self._returns.rate(line, now_s)
        saved_s = self._cost.per_block_s(line.start, line.cached_to)
        return Rank((0.0, rate * saved_s), until_s)
