"""Replays in a pool of processes, for those who ask for them, until the time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import suppress
from itertools import islice
from typing import Protocol

from slosched.evaluate.judge.play import Task, share_good
from slosched.evaluate.judge.time_limit import CALL_TIME_S, OutOfTimeError, TimeLimit

_AHEAD = 8
"""The replays that are given to the pool before they are needed; more would delay the end."""
_LAST_WAIT_S = CALL_TIME_S + 27.0
"""The time after which a worker is stuck in code that hears no alarm; one may be starting."""


class Player(Protocol):
    """What asked for a replay."""

    def take(self, task: Task, share: float, /) -> object: ...


More = Callable[[Container[Task]], Iterator[tuple[Player, Task]]]
"""Yields the replays to run next, with those who ask for them, given those that run."""
_Running = dict[Future[float], tuple[Player, Task]]


def work(
    pool: Executor, more: More, limit: TimeLimit, on_progress: Callable[[], None] = lambda: None
) -> None:
    """Run replays until there are no more or the time is over; hand them to who asked for them.

    Raises StuckPolicyError if a policy does not return from a call, and the error of a policy that
    fails.
    """
    running: _Running = {}
    with suppress(OutOfTimeError):
        while not limit.is_over():
            asked = more({task for _, task in running.values()})
            for player, task in islice(asked, _AHEAD - len(running)):
                if limit.is_over():  # a pool of this process itself replays in `submit`
                    break
                running[pool.submit(share_good, task)] = player, task
            if not running:
                return
            left_s = min(max(limit.end_s - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
            for future in wait(running, left_s, return_when=FIRST_COMPLETED).done:
                player, task = running.pop(future)
                player.take(task, future.result())
            on_progress()
    _end(running, limit)


def _end(running: _Running, limit: TimeLimit) -> None:
    """Wait until what runs has ended; raise StuckPolicyError for what does not."""
    begun = {future: task for future, (_, task) in running.items() if not future.cancel()}
    ended = wait(begun, _LAST_WAIT_S)
    for future in ended.done:
        with suppress(OutOfTimeError):
            future.result()
    for future in ended.not_done:
        raise limit.stuck(begun[future].contender.policy)
