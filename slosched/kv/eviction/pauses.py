"""The latest pauses between the turns of sessions."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence

from slosched.kv.eviction.lines import Line

_MOST_PAUSES = 512
"""Pauses that are remembered."""


class Pauses:
    """Remembers for how long each of the last 512 turns was awaited, whatever the session."""

    def __init__(self) -> None:
        self.in_order_s: list[float] = []
        """The pauses, the shortest first."""
        self._by_age: deque[float] = deque()

    def note_arrived(self, path: Sequence[Line], now_s: float) -> None:
        """Note a request that begins with the lines of `path`, the last of which may be idle."""
        if path and not path[-1].users and path[-1].left_number:
            pause_s = now_s - path[-1].left_s
            insort(self.in_order_s, pause_s)
            self._by_age.append(pause_s)
            if len(self._by_age) > _MOST_PAUSES:
                del self.in_order_s[bisect_left(self.in_order_s, self._by_age.popleft())]
