"""The step loop that plans step n + 1 while step n runs, for every policy alike.

vLLM's async scheduling and SGLang's overlap loop do the same.  Scheduling time is hidden behind the
device's.  The price is that every plan is one step stale.  A request that arrives during a step is
planned one step later, and one that the model ended still takes part in the next step, which is
wasted work.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from slosched.core import Clock, Executor, ScheduledBatch, StepResult
from slosched.engine.loop import Engine, Queued, StepRecord
from slosched.scheduler import Scheduler


@runtime_checkable
class LaunchingExecutor(Executor, Protocol):
    """An executor that runs launched steps in order while the caller goes on."""

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        """Launch a step that begins when the earlier ones have ended; the result waits for it.

        Output tokens of id `PLACEHOLDER` stand for those that the earlier steps emit.
        """


@dataclass(slots=True)
class _Step:
    """A launched step."""

    batch: ScheduledBatch
    queued: Queued
    wait: Callable[[], StepResult]
    began_s: float
    """The time when the step before it ended, or when it was launched if the device was idle."""
    schedule_s: float
    """How long it took to plan it."""


class OverlappedEngine(Engine):
    """An engine that leaves a step running between two calls of `step`."""

    def __init__(self, scheduler: Scheduler, executor: LaunchingExecutor, clock: Clock) -> None:
        super().__init__(scheduler, executor, clock)
        self._launch = executor.launch
        self._running: _Step | None = None

    @property
    def has_work(self) -> bool:
        return self._running is not None or super().has_work

    def step(self) -> StepRecord:
        """Plan and launch the next step, then wait for the running one and return its record.

        If the running step fails, its requests are aborted as faults before the error is raised.
        If planning fails, the running step is accounted for first, as far as that is possible.
        """
        running = self._running
        if running is None:
            start_s = self.clock.now_s()
            batch = self.scheduler.schedule(start_s)
            if batch.is_empty:
                self._note_idle_step(batch)
                ended, queued = self.take_ended(), self._queued()
                return StepRecord(start_s, start_s, batch, StepResult({}), ended, *queued)
            running = self._launched(batch, start_s)
        self._running = None
        try:
            self._running = self._launch_behind(running)
        except BaseException:
            num_faults = self.num_faults
            with suppress(Exception):  # where the plan was carried out by half, this may fail, too
                self._settle(running)
            self.num_faults = num_faults  # what is raised is no fault of the device
            raise
        return self._record(running)

    def settle(self) -> StepRecord | None:
        running, self._running = self._running, None
        return None if running is None else self._record(running)

    def _launch_behind(self, running: _Step) -> _Step | None:
        """Return the next step; None if there is nothing to run before `running` has ended.

        There is nothing, either, if the next plan depends on how many draft tokens are accepted.
        """
        scheduler, now_s = self.scheduler, self.clock.now_s()
        if not scheduler.can_plan_ahead:
            return None
        begins_s = max(now_s, running.began_s + (running.batch.predicted_s or 0.0))
        scheduler.foresee(running.batch, begins_s)
        if scheduler.num_unfinished == len(scheduler.queues.finishing):
            return None
        batch = scheduler.schedule(now_s, begins_s)
        return None if batch.is_empty else self._launched(batch, now_s)

    def _launched(self, batch: ScheduledBatch, asked_s: float) -> _Step:
        """Launch a batch that the scheduler was asked for at `asked_s`."""
        self._num_idle_steps = 0
        schedule_s = self.clock.now_s() - asked_s
        queued, wait = self._queued(), self._launch(batch)
        return _Step(batch, queued, wait, began_s=self.clock.now_s(), schedule_s=schedule_s)

    def _record(self, step: _Step) -> StepRecord:
        result, end_s = self._settle(step)
        ended, schedule_s = self.take_ended(), step.schedule_s
        return StepRecord(
            step.began_s, end_s, step.batch, result, ended, *step.queued, schedule_s=schedule_s
        )

    def _settle(self, step: _Step) -> tuple[StepResult, float]:
        """Wait for a step and account for it; return its result and the time at which it ended."""
        try:
            result = self._result_of(step.batch, step.wait, step.began_s)
        finally:
            if self._running is not None:
                self._running.began_s = self.clock.now_s()
                self.scheduler.begin(self._running.batch, self._running.began_s)
        result = _wanted(step.batch, result)
        return result, self._book(step.batch, result)


def _wanted(batch: ScheduledBatch, result: StepResult) -> StepResult:
    """Return the result without the tokens of requests that had ended before it."""
    ended = {c.request.request_id for c in batch.chunks if c.request.end_reason is not None}
    if not ended:
        return result
    token_ids = {name: token for name, token in result.token_ids.items() if name not in ended}
    return replace(result, token_ids=token_ids, stopped=result.stopped - ended)
