"""Bélády's order: first goes what is used again last.  It knows the future."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

from slosched.core import Request
from slosched.kv.eviction.lines import Line
from slosched.kv.eviction.order import EvictionOrder, Known, Rank, awaited


class Belady(EvictionOrder):
    """Evicts what is used again last, which a simulator knows once a turn has ended.

    With blocks that cost the same, nothing finds more of them again.  Here later blocks of a prompt
    cost more than earlier ones, and what counts is promises kept, so another order may win.  A
    session's return is the arrival of its next turn; sessions that have not begun are unknown.

    Source: Bélády, A study of replacement algorithms for a virtual-storage computer, 1966.
    """

    def __init__(self, known: Known) -> None:
        """Begin; raise ValueError if nobody knows when turns come."""
        if known.known_return is None:
            raise ValueError(
                "the eviction order belady has to know when the next turn of a session comes: use "
                "it in the simulator, on one replica, with a trace that has sessions"
            )
        self._return_s = known.known_return

    def note_ended(self, request: Request, path: Sequence[Line], now_s: float) -> None:  # noqa: ARG002
        return_s = self._return_s(request)
        if return_s < math.inf:
            for line in path:
                heappush(line.returns_s, return_s)

    def rank(self, line: Line, now_s: float) -> Rank:
        if line.users:
            return awaited(line)
        returns_s = line.returns_s
        while returns_s and returns_s[0] <= now_s:
            heappop(returns_s)
        next_s = returns_s[0] if returns_s else math.inf
        return Rank((0.0, -next_s), until_s=next_s)
