"""Replays in a pool of processes, for those who ask for them, until the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from itertools import islice
from typing import Protocol

from slosched.evaluate.judge.play import Task, share_good

_AHEAD = 8
"""The replays that are given to the pool before they are needed; more would delay the end."""


class Player(Protocol):
    """What asked for a replay."""

    def take(self, task: Task, share: float, /) -> object: ...


More = Callable[[Container[Task]], Iterator[tuple[Player, Task]]]
"""Yields the replays to run next, with those who ask for them, given those that run."""


def work(
    pool: Executor, more: More, end_s: float, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Run replays until there are no more or the time is over; hand them to who asked for them."""
    running: dict[Future[float], tuple[Player, Task]] = {}
    while time.monotonic() < end_s:
        asked = more({task for _, task in running.values()})
        for player, task in islice(asked, _AHEAD - len(running)):
            if time.monotonic() >= end_s:  # a pool of this process itself replays in `submit`
                break
            running[pool.submit(share_good, task)] = player, task
        if not running:
            return
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            player, task = running.pop(future)
            player.take(task, future.result())
        on_progress()
