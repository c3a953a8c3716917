"""Time limits that allow for a slow machine, such as a shared one that others keep busy."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable

_FULL_SPEED_S = 0.0020
"""The time of `_loop` on an idle core of a 2.5 GHz Xeon (CPython 3.11)."""
_PAUSE_S = 0.3


def slowed(limit_s: float) -> float:
    """Return `limit_s`, scaled up by how much slower this machine is than that core; never less.

    Call it right after the measurement that is judged, as a slow phase lasts for many seconds.
    """
    taken_s = statistics.median(timeit.repeat(_loop, number=1, repeat=40))
    return limit_s * max(1.0, taken_s / _FULL_SPEED_S)


def is_below(limit_s: float, measure: Callable[[], float], attempts: int = 12) -> bool:
    """Tell whether any of a few measurements is below the limit, as some fall into slow phases.

    There is a pause before each but the first, each longer than the one before, so that not all
    fall into the same one.
    """
    for attempt in range(attempts):
        time.sleep(attempt * _PAUSE_S)
        if measure() < slowed(limit_s):
            return True
    return False


def _loop() -> int:
    """Run plain Python code, like the code whose time is limited."""
    numbers = {i: i for i in range(1000)}
    total = 0
    for _ in range(20):
        for i, n in numbers.items():
            if n % 3:
                total += n * i // 7
    return total
