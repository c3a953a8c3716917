"""An executor in a thread of its own, so that planning need not wait for the device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple

from slosched.core import Executor, ScheduledBatch, StepResult
from slosched.engine.overlap import LaunchingExecutor


class _Launched(NamedTuple):
    """A launched step that waits for the device."""

    batch: ScheduledBatch
    ended: Sequence[str]
    """Requests to release before this step."""
    wait: Future[Callable[[], StepResult]]
    """What waits for the step, once it is launched on the device."""


class _Call(NamedTuple):
    """A function that waits for its turn in the device's thread."""

    function: Callable[[], object]
    result: Future[object]


class InBackground:
    """Runs the steps of `executor` one after the other in a thread; a `LaunchingExecutor`.

    An `executor` that is one itself need not end a step before it launches the next, and the thread
    that awaits a step's result waits for the device.  Any other one runs each step to its end in
    this object's thread.

    Requests may change while a step with them runs.  So `executor` may only rely on the chunks, on
    what a request was created with, and on output tokens that are not a `PLACEHOLDER`.  An error of
    a step is raised where that step's result is awaited.
    """

    def __init__(self, executor: Executor) -> None:
        self._ended: list[str] = []
        """Requests to release before the step launched next, since earlier steps may still use
        them."""
        self._launched: SimpleQueue[_Launched | _Call | None] = SimpleQueue()
        weakref.finalize(self, self._launched.put, None)
        # A daemon, so that a device that hangs cannot keep the process from ending.
        threading.Thread(
            target=_run, args=(executor, self._launched), name="slosched-device", daemon=True
        ).start()

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        ended, self._ended = self._ended, []
        wait: Future[Callable[[], StepResult]] = Future()
        self._launched.put(_Launched(batch, ended, wait))
        return lambda: wait.result()()

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.launch(batch)()

    def call(self, function: Callable[[], object]) -> object:
        """Call a function in the device's thread after the launched steps; return its result."""
        result: Future[object] = Future()
        self._launched.put(_Call(function, result))
        return result.result()

    def release(self, request_id: str) -> None:
        self._ended.append(request_id)


def _run(executor: Executor, launched: SimpleQueue[_Launched | _Call | None]) -> None:
    """Run steps and functions until None comes, which happens when the `InBackground` is gone."""
    while (step := launched.get()) is not None:
        try:
            if isinstance(step, _Call):
                step.result.set_result(step.function())
                continue
            for request_id in step.ended:
                executor.release(request_id)
            step.wait.set_result(_launched(executor, step.batch))
        except BaseException as error:
            future: Future[Any] = step.result if isinstance(step, _Call) else step.wait
            future.set_exception(error)
        del step  # otherwise its requests would stay alive until the next step


def _launched(executor: Executor, batch: ScheduledBatch) -> Callable[[], StepResult]:
    """Launch a step, and return what waits for its result."""
    if isinstance(executor, LaunchingExecutor):
        return executor.launch(batch)
    result = executor.execute(batch)
    return lambda: result
