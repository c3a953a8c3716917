"""The engine's thread: the only one that touches the scheduler, the KV cache and the device.

Handlers put requests and aborts into its inbox and await updates; it drains the inbox between two
steps.  Every request that is submitted gets exactly one update with an end reason, whatever
happens: the end of the model, an abort, a fault of the device, a bug of the policy, a shutdown.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from slosched.core import EndReason, Request, SloschedError
from slosched.engine.loop import Engine, StepRecord
from slosched.engine.server.metrics import ServerMetrics
from slosched.engine.server.steps import StepFeed
from slosched.engine.server.watchdog import StepLimit, Watchdog
from slosched.metrics import RequestRecord
from slosched.scheduler import Scheduler

log = logging.getLogger(__name__)

_STEP_LIMIT = StepLimit()


class NotServingError(SloschedError):
    """The server is shutting down or broken; the text says which and why."""


class Update(NamedTuple):
    """What became of a request in one step: a token, its end, or both."""

    token_id: int | None = None
    end_reason: EndReason | None = None
    detail: str = ""
    """What failed, for EndReason.FAULT."""


class Generation:
    """A request as its handler sees it: updates to await, in order, the last one with an end."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.loop = loop
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.first_scheduled_s: float | None = None
        """Start of the first step that computed some of it."""


class _Abort(NamedTuple):
    request_id: str
    reason: EndReason


class EngineWorker:
    """Runs an engine's steps in a thread of its own.  All methods may be called from any thread.

    `max_consecutive_faults` steps that fail one after the other mean that the device is gone for
    good; from then on the server is broken, as it is after a bug of the policy, and says so.  While
    a step takes longer than `step_limit` it is not healthy, but goes on taking requests.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_records: int = 10_000,
        max_consecutive_faults: int = 10,
        step_limit: StepLimit = _STEP_LIMIT,
    ) -> None:
        self._engine = engine
        self._inbox: list[Generation | _Abort] = []
        self._wake = threading.Condition()
        self._drain_until_s: float | None = None
        self._broken: str | None = None
        self._stopped = threading.Event()
        self._generations: dict[str, Generation] = {}
        self._num_faults = 0
        self._max_consecutive_faults = max_consecutive_faults
        self._thread = threading.Thread(target=self._run, name="slosched-engine", daemon=True)
        self.watchdog = Watchdog(engine, step_limit)
        self.metrics = ServerMetrics(engine.scheduler, self.watchdog)
        self.steps = StepFeed()
        self.records: deque[RequestRecord] = deque(maxlen=max_records)
        """The latest requests that ended, in order of their end."""

    @property
    def scheduler(self) -> Scheduler:
        """To look at; only the engine's thread may call what changes it."""
        return self._engine.scheduler

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the whole KV cache holds."""
        return self.scheduler.kv.num_blocks * self.scheduler.kv.block_size

    @property
    def why_not_serving(self) -> str | None:
        """None while requests are taken."""
        if self._broken is not None:
            return self._broken
        return None if self._drain_until_s is None else "it is shutting down"

    @property
    def why_over(self) -> str | None:
        """None while there may be further steps."""
        if self._broken is not None:
            return self._broken
        return "it has shut down" if self.has_stopped else None

    @property
    def has_stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def num_cut_short(self) -> int:
        """Requests that a shutdown ended before they were finished, or that it left unended."""
        submitted = [command for command in self._inbox if isinstance(command, Generation)]
        ended = self.metrics.num_ended(EndReason.SHUTDOWN)
        return ended + len(self._generations) + len(submitted)

    def now_s(self) -> float:
        """The engine's clock, on which arrivals are stamped."""
        return self._engine.clock.now_s()

    def start(self) -> None:
        self._thread.start()
        watch = threading.Thread(
            target=self.watchdog.run, args=(self._stopped,), name="slosched-watchdog", daemon=True
        )
        watch.start()

    def submit(self, request: Request) -> Generation:
        """Queue a request whose updates go to the running event loop.

        Raises NotServingError while draining or broken.
        """
        generation = Generation(request, asyncio.get_running_loop())
        with self._wake:
            if (why := self.why_not_serving) is not None:
                raise NotServingError(why)
            self._inbox.append(generation)
            self._wake.notify()
        return generation

    def abort(self, request_id: str, reason: EndReason = EndReason.CLIENT) -> None:
        """End a request before its time; nothing if it has ended already.

        With EndReason.STOP it counts as finished: its text has reached a stop string.
        """
        with self._wake:
            self._inbox.append(_Abort(request_id, reason))
            self._wake.notify()

    def begin_drain(self, timeout_s: float) -> None:
        """Take no more requests; stop once all have ended, or abort the rest after `timeout_s`.

        Of several calls the one whose time is over first holds: a drain can be cut short.
        """
        with self._wake:
            until_s = self.now_s() + timeout_s
            if self._drain_until_s is None or until_s < self._drain_until_s:
                self._drain_until_s = until_s
            self._wake.notify()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of a drain; False if it takes longer than `timeout_s`."""
        return self._stopped.wait(timeout_s)

    def _run(self) -> None:
        try:
            while (commands := self._next_commands()) is not None:
                self._turn(commands)
        except Exception as error:  # a bug of ours: nobody may be left waiting for ever
            log.exception("the engine thread died")
            self._die(f"its engine thread died of {_describe(error)}")
        finally:
            self._stopped.set()

    def _next_commands(self) -> list[Generation | _Abort] | None:
        """Sleep until there is something to do; None once drained."""
        with self._wake:
            while not self._inbox and not self._engine.has_work:
                if self._drain_until_s is not None:
                    return None
                self._wake.wait()
            commands, self._inbox = self._inbox, []
            return commands

    def _turn(self, commands: Iterable[Generation | _Abort]) -> None:
        for command in commands:
            if isinstance(command, Generation):
                self._generations[command.request.request_id] = command
                self.scheduler.add_request(command.request)
            else:
                self._carry_out(command)
        if self._drain_until_s is not None and self.now_s() >= self._drain_until_s:
            self._abort_all(EndReason.SHUTDOWN)
        if self._broken is not None:
            self._abort_all(EndReason.FAULT)
        if self._engine.has_work:
            self._step()
        else:
            self._report({}, self._engine.take_ended())

    def _carry_out(self, abort: _Abort) -> None:
        self.scheduler.end(abort.request_id, abort.reason, self.now_s())

    def _abort_all(self, reason: EndReason) -> None:
        now_s = self.now_s()
        for request in self.scheduler.unfinished():
            self.scheduler.end(request.request_id, reason, now_s)

    def _step(self) -> None:
        num_faults = self._engine.num_faults
        self.watchdog.began()
        try:
            record = self._engine.step()
        except Exception as error:
            self._handle_failed_step(error, is_fault=self._engine.num_faults > num_faults)
            return
        finally:
            self.watchdog.ended()
        self._num_faults = 0
        self._note_first_scheduled(record)
        self.metrics.observe_step(record)
        self._report(record.result.token_ids, record.ended)
        self.steps.publish(record)

    def _handle_failed_step(self, error: Exception, *, is_fault: bool) -> None:
        """A failing device costs the requests of that step, a policy's bug costs them all."""
        what = _describe(error)
        log.error("a step failed: %s", what, exc_info=error)
        ended = self._engine.take_ended()
        hits = sum(request.end_reason is EndReason.FAULT for request in ended)
        if is_fault:
            # With overlap, one trouble fails two steps, the second of which may have lost everyone.
            self._num_faults += hits > 0
            if self._num_faults >= self._max_consecutive_faults:
                self._broken = f"{self._num_faults} steps failed one after the other, with {what}"
        else:
            self._broken = f"a step could not be planned or booked, with {what}"
        if self._broken is not None:
            self._abort_all(EndReason.FAULT)
            ended += self._engine.take_ended()
        self._report({}, ended, detail=self._broken or what)
        if self._broken is not None:
            self._fail_rest()

    def _note_first_scheduled(self, record: StepRecord) -> None:
        for chunk in record.batch.chunks:
            generation = self._generations.get(chunk.request.request_id)
            if generation is not None and generation.first_scheduled_s is None:
                generation.first_scheduled_s = record.start_s
                self.metrics.queue_time.observe(record.start_s - chunk.request.arrival_s)

    def _report(
        self, token_ids: Mapping[str, int], ended: Iterable[Request], detail: str = ""
    ) -> None:
        """Tell every handler what happened to its request, and keep the records of the ended."""
        updates = {name: Update(token_id) for name, token_id in token_ids.items()}
        for request in ended:
            name = request.request_id
            is_fault = request.end_reason is EndReason.FAULT
            why = (detail or self._broken or "") if is_fault else ""
            updates[name] = Update(token_ids.get(name), request.end_reason, why)
            record = RequestRecord.from_request(request)
            self.records.append(record)
            self.metrics.observe_end(record)
        self._deliver(updates)

    def _deliver(self, updates: Mapping[str, Update]) -> None:
        """One wake-up of each event loop, however many of its requests got something."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Generation, Update]]] = {}
        for name, update in updates.items():
            generation = self._generations[name]
            if update.end_reason is not None:
                del self._generations[name]
            by_loop.setdefault(generation.loop, []).append((generation, update))
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_over, deliveries)
            except RuntimeError:  # the loop is closed, so nobody awaits these any more
                log.warning("%d updates came after their event loop had closed", len(deliveries))

    def _die(self, why: str) -> None:
        """Last resort, without asking the scheduler."""
        with self._wake:
            self._broken = why
            inbox, self._inbox = self._inbox, []
        for command in inbox:
            if isinstance(command, Generation):
                self._generations[command.request.request_id] = command
        self._fail_rest()

    def _fail_rest(self) -> None:
        """Answer whoever still waits: the engine has lost sight of these requests."""
        assert self._broken is not None
        end = Update(None, EndReason.FAULT, self._broken)
        self._deliver(dict.fromkeys(self._generations, end))


def _hand_over(deliveries: Iterable[tuple[Generation, Update]]) -> None:
    for generation, update in deliveries:
        generation.updates.put_nowait(update)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
