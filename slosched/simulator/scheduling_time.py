"""The time that scheduling takes on the host in the simulator, in parallel to steps or not."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from slosched.core import (
    DraftOffer,
    Executor,
    Policy,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerView,
    StepResult,
)
from slosched.simulator.simulated import VirtualClock

MEASURED: Literal["measured"] = "measured"
"""The `schedule_s` that stands for the decision's time on this machine; it is not reproducible."""

ScheduleTime = float | Literal["measured"]


class TakesTime(Policy):
    """A policy each of whose decisions lets time pass on a simulation's clock."""

    def __init__(self, policy: Policy, clock: VirtualClock, schedule_s: ScheduleTime) -> None:
        if schedule_s != MEASURED and not 0 <= schedule_s < float("inf"):
            raise ValueError(f"schedule_s must be finite seconds >= 0, not {schedule_s!r}")
        self._policy = policy
        self._clock = clock
        self._schedule_s = schedule_s

    def __repr__(self) -> str:
        return repr(self._policy)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        start_s = time.perf_counter()
        output = self._policy.schedule(view)
        measured_s = time.perf_counter() - start_s
        self._clock.advance(measured_s if self._schedule_s == MEASURED else self._schedule_s)
        return output

    def choose_drafts(
        self, offers: Sequence[DraftOffer], output: SchedulerOutput, view: SchedulerView
    ) -> Sequence[int]:
        return self._policy.choose_drafts(offers, output, view)

    def reset(self) -> None:
        self._policy.reset()


class SimulatedDevice:
    """A simulated executor with its own clock, so that the host's clock can go on meanwhile."""

    def __init__(self, executor: Executor, device: VirtualClock, host: VirtualClock) -> None:
        """Wrap `executor`, whose steps let time pass on the clock `device`."""
        self._executor = executor
        self._device = device
        self._host = host

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        return partial(self._wait, batch, self._host.now_s())

    def execute(self, batch: ScheduledBatch) -> StepResult:
        return self.launch(batch)()

    def release(self, request_id: str) -> None:
        self._executor.release(request_id)

    def _wait(self, batch: ScheduledBatch, launched_s: float) -> StepResult:
        self._device.advance_to(launched_s)
        result = self._executor.execute(batch)
        self._host.advance_to(self._device.now_s())
        return result
