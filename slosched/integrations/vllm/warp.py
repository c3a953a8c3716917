"""Time warp: a process in which sleeping takes no time and moves the clock instead.

Inside `warped()`, `time.time`, `time.monotonic` and `time.sleep` are those of one virtual clock.
vLLM, slosched's scheduler and the `EmulatedExecutor` call them as attributes of `time`, so all of
them see the same clock, and a step of the emulated device ends as soon as vLLM waits for it.

Computing takes no virtual time, so whatever vLLM and the policy compute is free.  Only the thread
that entered the warp moves the clock; sleeps of other threads are real.  `time.perf_counter`,
`time.process_time` and the timeouts of locks and queues remain real, too.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

_BEGIN_S = 1000.0
"""The virtual time at which a warp begins.  It is always the same, so that runs repeat exactly."""


class VirtualClock:
    """A clock that only `sleep` moves."""

    def __init__(self, now_s: float = _BEGIN_S) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        """Return the virtual time in seconds."""
        return self._now_s

    def sleep(self, seconds: float) -> None:
        """Move the clock forward at once; raise ValueError if `seconds` is negative."""
        if not seconds >= 0:
            raise ValueError(f"a sleep must not be negative, but is {seconds!r} s")
        self._now_s += seconds


@contextmanager
def warped() -> Iterator[VirtualClock]:
    """Give this process the virtual time of one clock until the end of the block.

    Use it in a process of its own: every thread reads the virtual time.
    """
    clock = VirtualClock()
    mover, really_sleep = threading.get_ident(), time.sleep

    def sleep(seconds: float) -> None:
        is_mover = threading.get_ident() == mover
        (clock.sleep if is_mover else really_sleep)(seconds)

    with (
        patch.object(time, "time", clock.now_s),
        patch.object(time, "monotonic", clock.now_s),
        patch.object(time, "sleep", sleep),
    ):
        yield clock
