"""How slow this machine is just now: neighbours of a shared one take minutes of its time."""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable

_FULL_SPEED_S = 0.0020
"""The loop's time on one core of a 2.5 GHz Xeon that does nothing else (CPython 3.11)."""


def slowed(limit_s: float) -> float:
    """`limit_s`, longer by as much as the machine is slower than that core; never shorter.

    To be called right after what is judged: a slow phase lasts for many seconds.
    """
    taken_s = statistics.median(timeit.repeat(_loop, number=1, repeat=40))
    return limit_s * max(1.0, taken_s / _FULL_SPEED_S)


def is_below(limit_s: float, measure: Callable[[], float], attempts: int = 4) -> bool:
    """True if any of a few measurements is: a slow phase may begin or end within one of them."""
    return any(measure() < slowed(limit_s) for _ in range(attempts))


def _loop() -> int:
    """Plain Python, as what it is compared with."""
    numbers = {i: i for i in range(1000)}
    total = 0
    for _ in range(20):
        for i, n in numbers.items():
            if n % 3:
                total += n * i // 7
    return total
