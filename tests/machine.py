"""Time limits that allow for a slow machine, such as a shared one that others keep busy."""

from __future__ import annotations

import random
import statistics
import time
import timeit
from collections.abc import Callable
from operator import attrgetter

_FULL_SPEED_S = 0.0020
"""The time of `_loop` on an idle core of a 2.5 GHz Xeon (CPython 3.11)."""
_MEMORY_S = 0.0005
"""The time of `_walk` from which on the memory counts as slow, which `_loop` does not show.

On a shared machine that was slow by turns a decision of `goodput` took 1.4 to 2.4 times as long as
`_walk`, mostly 2; so a millisecond stands for half of one.  No quiet machine was at hand.
"""
_PAUSE_S = 0.3


def slowed(limit_s: float) -> float:
    """Return `limit_s`, scaled up by how much slower this machine is than that core; never less.

    Call it right after the measurement that is judged, as a slow phase lasts for many seconds.
    """
    return limit_s * max(1.0, _taken_s(_loop) / _FULL_SPEED_S, _taken_s(_walk) / _MEMORY_S)


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


def _taken_s(work: Callable[[], object]) -> float:
    return statistics.median(timeit.repeat(work, number=1, repeat=40))


def _loop() -> int:
    """Run plain Python code, like the code whose time is limited."""
    numbers = {i: i for i in range(1000)}
    total = 0
    for _ in range(20):
        for i, n in numbers.items():
            if n % 3:
                total += n * i // 7
    return total


class _Thing:
    """An object like a request: with a name, a time and a list of its own."""

    def __init__(self, number: int, due_s: float) -> None:
        self.name = f"thing{number}"
        self.due_s = due_s
        self.tokens = [number] * 8


def _made_things(num: int) -> list[_Thing]:
    """Return objects that lie in the memory in another order than in the list."""
    rng = random.Random(1)
    things = [_Thing(number, rng.random()) for number in range(num)]
    rng.shuffle(things)
    return things


_THINGS = _made_things(2000)


def _walk() -> float:
    """Visit many objects in an order of their own, as a policy visits requests."""
    by_name = {thing.name: thing for thing in _THINGS}
    return sum(
        thing.due_s * len(thing.tokens) + by_name[thing.name].tokens[3]
        for thing in sorted(_THINGS, key=attrgetter("due_s"))
    )
