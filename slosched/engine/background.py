"""An executor in a thread of its own, so that whoever plans need not wait for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

from slosched.core import Executor, ScheduledBatch, StepResult


class InBackground:
    """Runs the steps of `executor` one after the other in a thread; a `LaunchingExecutor`.

    While a step runs the requests in it may change: `executor` may rely on what the chunk says, on
    what a request was made with, and on its output tokens that are not a `PLACEHOLDER`.  An error
    comes back to whoever waits for the step.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._launched: SimpleQueue[tuple[ScheduledBatch, list[str], Future[StepResult]]]
        self._launched = SimpleQueue()
        self._ended: list[str] = []
        """Requests to release before the step that is launched next: steps before may hold them."""
        # A daemon, for a device that hangs must not keep the process alive.
        threading.Thread(target=self._run, name="slosched-device", daemon=True).start()

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        future: Future[StepResult] = Future()
        ended, self._ended = self._ended, []
        self._launched.put((batch, ended, future))
        return future.result

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.launch(batch)()

    def release(self, request_id: str) -> None:
        self._ended.append(request_id)

    def _run(self) -> None:
        while True:
            batch, ended, future = self._launched.get()
            try:
                for request_id in ended:
                    self._executor.release(request_id)
                future.set_result(self._executor.execute(batch))
            except Exception as error:
                future.set_exception(error)
