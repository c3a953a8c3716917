"""Pools that run the replays of a sweep: in this process, or in one process a core.

A pool is a `concurrent.futures.Executor` whose workers have called an initializer once, as those
of `ProcessPoolExecutor` do.  `integrations.ray` has a pool that spans a cluster.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from threading import Thread, current_thread, main_thread
from typing import Any, TypeVar

from slosched.evaluate.capacity.point import Bench, Point

MakePool = Callable[[Callable[[], None]], Executor]
"""A function that makes a pool whose workers have called the function that it is given."""

T = TypeVar("T")

_given: dict[type, Any] = {}
"""Objects given to this worker process, by type; an executor has no other place for them."""


def give(thing: object) -> None:
    """Keep in this worker process what all of its tasks share, for `given`."""
    _given[type(thing)] = thing


def given(kind: type[T]) -> T:
    """Return what this worker process was given last of this type."""
    thing = _given.get(kind)
    assert isinstance(thing, kind), f"the worker was given no {kind.__name__}"
    return thing


def run_point(point: Point) -> bytes:
    """Return the packed outcomes of one replay, run on this worker's bench."""
    return given(Bench).run(point).pack()


def local_pool(jobs: int | None = None) -> MakePool:
    """Return a way to make a pool of one process a core; with one job, of this process itself.

    Raises ValueError for less than one job.
    """
    if jobs is not None and jobs < 1:
        raise ValueError(f"a pool needs at least one job, not {jobs}")
    num_jobs = jobs or os.cpu_count() or 1
    if num_jobs == 1:
        return _SameProcess

    def make(initialize: Callable[[], None]) -> Executor:
        # Spawned on every system, since a forked worker would inherit the progress bar's threads.
        context = get_context("spawn")
        return _Processes(num_jobs, context, partial(_start_quietly, initialize))

    return make


def stop_at_once(pool: Executor) -> None:
    """End a pool with what it runs, which may never end by itself."""
    processes = list(pool.processes) if isinstance(pool, _Processes) else []
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.kill()


def _start_quietly(initialize: Callable[[], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    Thread(target=_end_with_the_parent, name="slosched-parent", daemon=True).start()
    initialize()


def _end_with_the_parent() -> None:
    """End this process when the one that started it has ended, even if that was killed.

    A worker that waits for a task would not see it: the workers hold both ends of their queues.
    """
    parent = parent_process()
    assert parent is not None, "a worker was started by another process"
    parent.join()
    os._exit(1)


class _Processes(ProcessPoolExecutor):
    """Processes that do not hear Ctrl-C, not even while they start and import what they need."""

    @property
    def processes(self) -> Iterable[BaseProcess]:
        """Return those that were started; until Python 3.14 nobody else can end them."""
        return (self._processes or {}).values()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with _undisturbed():
            return super().submit(fn, *args, **kwargs)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM until the end of this block, which may start a process.

    The process is to get all that it is sent at its start, and the pool is to know of it.  A
    process that starts has the mask of this thread, so that it does not hear Ctrl-C.  The mask
    alone does not do for this process: its other threads hear Ctrl-C, and tell the first one.
    """
    if not hasattr(signal, "pthread_sigmask") or current_thread() is not main_thread():
        yield  # on Windows; handlers are called in the main thread only
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {n: signal.signal(n, lambda number, _frame: came.append(number)) for n in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for late in came:
            signal.raise_signal(late)


class _SameProcess(Executor):
    """An executor that runs each task inside `submit`."""

    def __init__(self, initialize: Callable[[], None]) -> None:
        initialize()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
