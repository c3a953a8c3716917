"""Events in the order of their virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from slosched.simulator.simulated import VirtualClock


class Timeline:
    """Actions that are due at times of their own, and a clock that shows the time of the last.

    At the same time, steps come after all else, and actions of one kind in the order in which they
    were added.
    """

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._due: list[tuple[float, bool, int, Callable[[], None]]] = []
        self._num_added = 0

    @property
    def next_s(self) -> float:
        """Return the time of the next action; inf if there is none."""
        return self._due[0][0] if self._due else math.inf

    def add(self, at_s: float, action: Callable[[], None], *, is_step: bool = False) -> None:
        """Let `action` be called at `at_s`, which may not be before the time on the clock."""
        heappush(self._due, (at_s, is_step, self._num_added, action))
        self._num_added += 1

    def run(self) -> None:
        """Call all actions, also those that they add."""
        while self._due:
            at_s, _, _, action = heappop(self._due)
            self.clock.advance_to(at_s)
            action()
