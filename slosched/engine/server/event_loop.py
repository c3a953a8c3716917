"""An event loop that measures its turns: while one lasts, no client is answered."""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Iterator
from selectors import SelectorKey

from slosched.engine.server.prometheus import Histogram, sample

_TURNS = ("slosched:event_loop_turn_seconds", "Time in which the HTTP server did one round of work")
_LONGEST = "slosched:event_loop_longest_turn"


class TimedLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how long its turns took: the time between two waits for events."""

    def __init__(self) -> None:
        self.turns = Turns()
        super().__init__(_TimedSelector(self.turns))


class Turns:
    """How long the turns of a loop took, by the clock and in processor time of its thread.

    A turn that takes long but little processor time waited for another thread of the process, or
    for a core.
    """

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._began_cpu_s = 0.0
        self._histogram = Histogram(*_TURNS)
        self.longest_s = 0.0
        self.longest_cpu_s = 0.0
        """The most processor time that a turn took, which need not be the longest one."""

    def begin(self) -> None:
        self._began_s, self._began_cpu_s = time.monotonic(), time.thread_time()

    def end(self) -> None:
        """Count the turn that began last, if any."""
        if self._began_s is None:
            return
        took_s = time.monotonic() - self._began_s
        self._histogram.observe(took_s)
        self.longest_s = max(self.longest_s, took_s)
        self.longest_cpu_s = max(self.longest_cpu_s, time.thread_time() - self._began_cpu_s)

    def lines(self) -> Iterator[str]:
        """Yield the metrics of all turns since the start."""
        yield from self._histogram.lines("")
        text = "The longest round of work of the HTTP server"
        yield from sample(f"{_LONGEST}_seconds", "gauge", f"{text}.", "", self.longest_s)
        cpu = f"{text}, in processor time."
        yield from sample(f"{_LONGEST}_cpu_seconds", "gauge", cpu, "", self.longest_cpu_s)


class _TimedSelector(selectors.DefaultSelector):
    """A selector that ends a turn when the loop begins to wait, and begins one afterwards."""

    def __init__(self, turns: Turns) -> None:
        super().__init__()
        self._turns = turns

    def select(self, timeout: float | None = None) -> list[tuple[SelectorKey, int]]:
        self._turns.end()
        try:
            return super().select(timeout)
        finally:
            self._turns.begin()


def event_loop_lines(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    """Yield the metrics of the loop that answers: its tasks and, if it measures them, its turns."""
    text = "Tasks of the HTTP server that have not ended."
    num_tasks = len(asyncio.all_tasks(loop))
    yield from sample("slosched:event_loop_tasks", "gauge", text, "", num_tasks)
    if isinstance(loop, TimedLoop):
        yield from loop.turns.lines()
