"""The step loop for simulation and real devices alike: schedule, execute, update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from slosched.core import (
    Clock,
    Executor,
    Request,
    RequestStatus,
    ScheduledBatch,
    SloschedError,
    StalledError,
    StepResult,
)
from slosched.metrics import StepRow
from slosched.scheduler import Scheduler


class ExecutorFaultError(SloschedError):
    """An executor broke its contract."""


class MonotonicClock:
    """A clock of real seconds with an arbitrary zero."""

    def now_s(self) -> float:
        return time.monotonic()


class Queued(NamedTuple):
    """The queues and the KV cache right after a plan was carried out, before the device ran it."""

    num_waiting: int
    num_running: int
    num_swapped: int
    kv_used_fraction: float


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The events of one step, from which all statistics of a run are computed.

    Queue lengths and cache use are those right after the plan was carried out, before the device
    ran it.
    """

    start_s: float
    end_s: float
    batch: ScheduledBatch
    result: StepResult
    ended: Sequence[Request]
    num_waiting: int
    num_running: int
    num_swapped: int
    kv_used_fraction: float
    schedule_s: float = 0.0
    """How long the scheduler took to plan the step."""

    def row(self) -> StepRow:
        """Return the row that timelines and statistics keep of the step."""
        shape = self.batch.shape
        return StepRow(
            start_s=self.start_s,
            duration_s=self.end_s - self.start_s,
            predicted_s=self.batch.predicted_s,
            num_prefill_tokens=shape.num_prefill_tokens,
            num_decodes=shape.num_decodes,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            num_swapped=self.num_swapped,
            kv_used_fraction=self.kv_used_fraction,
            num_rejected=sum(r.status is RequestStatus.REJECTED for r in self.ended),
        )


class Engine:
    """A scheduler, an executor and a clock, joined by `step`."""

    def __init__(
        self, scheduler: Scheduler, executor: Executor, clock: Clock, *, host_s: float = 0.0
    ) -> None:
        """Join them; `host_s` is the part of predicted step times that the executor does not see.

        It is the host's time for a step, where nothing hides it.
        """
        self._host_s = host_s
        self.scheduler = scheduler
        self.executor = executor
        self.clock = clock
        self.num_faults = 0
        """The number of steps at which the executor failed."""
        self.waits_for: tuple[ScheduledBatch | None, float] = (None, 0.0)
        """The batch for which the loop waits, and since when; None while it waits for none."""
        self._num_idle_steps = 0

    @property
    def has_work(self) -> bool:
        """Tell whether there is a step to run or to wait for."""
        return self.scheduler.num_unfinished > 0

    def step(self) -> StepRecord:
        """Run one step and return its record.

        If the executor raises, every request whose KV cache it may have spoilt is aborted as a
        fault before the error goes on to the caller.  The other requests are kept, and the queues
        stay usable.
        """
        start_s = self.clock.now_s()
        batch = self.scheduler.schedule(start_s)
        planned_s = self.clock.now_s()
        queued, result = self._queued(), StepResult({})
        if batch.is_empty:
            self._note_idle_step(batch)
        else:
            self._num_idle_steps = 0
            wait = partial(self.executor.execute, batch)
            result = self._result_of(batch, wait, planned_s)
        end_s = self._book(batch, result)
        ended, schedule_s = self.take_ended(), planned_s - start_s
        return StepRecord(start_s, end_s, batch, result, ended, *queued, schedule_s=schedule_s)

    def settle(self) -> StepRecord | None:
        """Wait for a step that still runs and return its record; None if none runs."""
        return None

    def take_ended(self) -> list[Request]:
        """Return the requests that ended since the last call, and release them in the executor."""
        ended = self.scheduler.take_ended()
        for request in ended:
            self.executor.release(request.request_id)
        return ended

    def _queued(self) -> Queued:
        scheduler = self.scheduler
        return Queued(
            scheduler.num_waiting,
            scheduler.num_running,
            scheduler.num_swapped,
            scheduler.kv.used_fraction,
        )

    def _book(self, batch: ScheduledBatch, result: StepResult) -> float:
        """Account for a step that ends now; return the time on the clock."""
        scheduler, end_s = self.scheduler, self.clock.now_s()
        scheduler.update(batch, result, end_s)
        if scheduler.latency_model is not None and batch.chunks:
            scheduler.latency_model.observe(batch.shape, result.elapsed_s + self._host_s)
        return end_s

    def _result_of(
        self, batch: ScheduledBatch, wait: Callable[[], StepResult], began_s: float
    ) -> StepResult:
        self.waits_for = batch, began_s
        try:
            result = wait()
            if batch.output.num_scheduled_tokens.keys() - result.token_ids.keys():
                _check_tokens(batch, result)
            return result
        except BaseException:  # a panic of a library in Rust is no Exception
            self.scheduler.on_failed_step(batch, self.clock.now_s())
            self.num_faults += 1  # now, since else the KV cache may have spoilt blocks
            raise
        finally:
            self.waits_for = None, self.clock.now_s()

    def _note_idle_step(self, batch: ScheduledBatch) -> None:
        """Count an idle step; raise StalledError if requests are unfinished and nothing changes.

        A step that rejects is no idle one: it ends a request, or eases its SLO, which it does a few
        times at most.  While a server rejects all that come, it has many such steps in a row, and
        the others of a rejected group end in the next one.
        """
        num_unfinished = self.scheduler.num_unfinished
        if batch.output.rejected:
            self._num_idle_steps = 0
            return
        self._num_idle_steps += 1
        if num_unfinished and (
            batch.output.is_empty or self._num_idle_steps > 2 * num_unfinished + 8
        ):
            policy = type(self.scheduler.policy).__name__
            raise StalledError(
                f"{policy} scheduled nothing although {num_unfinished} requests are unfinished ("
                f"{self.scheduler.num_waiting} waiting, "
                f"{self.scheduler.num_running} running, {self.scheduler.num_swapped} swapped)"
            )


def _check_tokens(batch: ScheduledBatch, result: StepResult) -> None:
    for chunk in batch.chunks:
        request_id = chunk.request.request_id
        if (
            chunk.emits_token
            and request_id not in result.token_ids
            and request_id not in result.failed
            and request_id not in result.barred
        ):
            raise ExecutorFaultError(f"the executor returned no token for {request_id!r}")
