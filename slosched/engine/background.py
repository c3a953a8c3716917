"""An executor in a thread of its own, so that whoever plans need not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from slosched.core import Executor, ScheduledBatch, StepResult


class InBackground:
    """Runs the steps of `executor` one after the other in a thread; a `LaunchingExecutor`.

    While a step runs the requests in it may change: `executor` may rely on what the chunk says, on
    what a request was made with, and on its output tokens that are not a `PLACEHOLDER`.  An error
    comes back to whoever waits for the step.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(1, "slosched-device")
        self._ended: list[str] = []
        """Requests to release before the step that is launched next: steps before may hold them."""

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        ended, self._ended = self._ended, []
        return self._thread.submit(self._run, ended, batch).result

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.launch(batch)()

    def release(self, request_id: str) -> None:
        self._ended.append(request_id)

    def _run(self, ended: Sequence[str], batch: ScheduledBatch) -> StepResult:
        for request_id in ended:
            self._executor.release(request_id)
        return self._executor.execute(batch)
