"""An executor in a thread of its own, so that planning need not wait for the device."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import NamedTuple

from slosched.core import Executor, ScheduledBatch, StepResult


class _Launched(NamedTuple):
    """A launched step that waits for the device."""

    batch: ScheduledBatch
    ended: Sequence[str]
    """Requests to release before this step."""
    result: Future[StepResult]


class _Call(NamedTuple):
    """A function that waits for its turn in the device's thread."""

    function: Callable[[], object]
    result: Future[object]


class InBackground:
    """Runs the steps of `executor` one after the other in a thread; a `LaunchingExecutor`.

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
        result: Future[StepResult] = Future()
        self._launched.put(_Launched(batch, ended, result))
        return result.result

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
            step.result.set_result(executor.execute(step.batch))
        except BaseException as error:
            step.result.set_exception(error)
        del step  # otherwise its requests would stay alive until the next step
