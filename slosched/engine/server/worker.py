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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

from slosched.core import (
    EndReason,
    LatencyModel,
    Request,
    SloschedError,
    TokenLogprobs,
)
from slosched.engine.loop import Engine, StepRecord
from slosched.engine.server.generations import Generation, Generations, Update, answer_id
from slosched.engine.server.metrics import ServerMetrics
from slosched.engine.server.steps import StepFeed
from slosched.engine.server.watchdog import StepLimit, Watchdog
from slosched.metrics import RequestRecord, worst
from slosched.policy.door import Door
from slosched.policy.offer import Offer, offer_of
from slosched.scheduler import Scheduler

log = logging.getLogger(__name__)

T = TypeVar("T")

_STEP_LIMIT = StepLimit()
_NO_FAULTS: Mapping[str, str] = {}
_EXPLAINED = (EndReason.FAULT, EndReason.NO_TOKEN)
_NO_LOGPROBS: Mapping[str, Sequence[TokenLogprobs]] = {}


class NotServingError(SloschedError):
    """The server is shutting down or broken; the text says which and why."""


class NoQuoteError(SloschedError):
    """The policy cannot say what a request would be promised."""


class _Abort(NamedTuple):
    request_id: str
    reason: EndReason


class _Operation(NamedTuple):
    """Something to do between two steps, while the device is idle."""

    run: Callable[[Engine], object]
    result: Future[object]


_Command = Generation | _Abort | _Operation


class EngineWorker:
    """Runs an engine's steps in a thread of its own.  All methods may be called from any thread.

    After `max_consecutive_faults` failed steps in a row, the device counts as lost, and the thread
    ends, as it also does after a bug of the policy.  While a step takes longer than `step_limit`,
    the server takes no requests; if it takes longer still, the thread is left behind, and all
    requests fail.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_records: int = 1000,
        max_consecutive_faults: int = 10,
        step_limit: StepLimit = _STEP_LIMIT,
    ) -> None:
        self._engine = engine
        self._inbox: list[_Command] = []
        self._taken: deque[_Command] = deque()
        """Commands that were taken out of the inbox and whose turn has yet to come."""
        self._wake = threading.Condition()
        self._drain_until_s: float | None = None
        self._broken: str | None = None
        self._stopped = threading.Event()
        self._generations = Generations()
        self._num_faults = 0
        self._max_consecutive_faults = max_consecutive_faults
        self._thread = threading.Thread(target=self._run, name="slosched-engine", daemon=True)
        self.watchdog = Watchdog(engine, step_limit)
        self.metrics = ServerMetrics(engine.scheduler, self.watchdog)
        self.steps = StepFeed()
        self.records: deque[RequestRecord] = deque(maxlen=max_records)
        """The latest requests that ended, in the order in which they ended.  They are few, since a
        full garbage collection, during which nobody is answered, looks at each."""

    @property
    def scheduler(self) -> Scheduler:
        """Return the scheduler to read from; only the engine's thread may change it."""
        return self._engine.scheduler

    @property
    def requests(self) -> list[Request]:
        """Return the requests that have not ended, to read from."""
        return self._generations.requests

    @property
    def capacity_tokens(self) -> int:
        """Return the number of tokens that the whole KV cache holds."""
        return self.scheduler.kv.num_blocks * self.scheduler.kv.block_size

    @property
    def why_not_serving(self) -> str | None:
        """Return why no requests are taken; None while they are."""
        if self._broken is not None:
            return self._broken
        return None if self._drain_until_s is None else "it is shutting down"

    @property
    def why_refusing(self) -> str | None:
        """Return why a request would be refused now, whatever it asks for; None if it would not."""
        if (why := self.why_not_serving) is not None:
            return why
        hang = self.watchdog.hang()
        return None if hang is None else hang.reason

    @property
    def why_broken(self) -> str | None:
        """Return why the engine has failed for good; None if it has not."""
        return self._broken

    @property
    def why_over(self) -> str | None:
        """Return why there will be no further steps; None while there may be some."""
        if self._broken is not None:
            return self._broken
        return "it has shut down" if self.has_stopped else None

    @property
    def has_stopped(self) -> bool:
        return self._stopped.is_set()

    @property
    def num_cut_short(self) -> int:
        """Return how many requests a shutdown ended unfinished or left without an end."""
        commands = (*self._taken.copy(), *self._inbox)
        submitted = [command for command in commands if isinstance(command, Generation)]
        ended = self.metrics.num_ended(EndReason.SHUTDOWN)
        return ended + self._generations.num_answers_awaited + len(submitted)

    def now_s(self) -> float:
        """Return the time on the engine's clock, by which arrivals are stamped."""
        return self._engine.clock.now_s()

    def start(self) -> None:
        self._thread.start()
        watched = (self._stopped, self._leave_behind)
        watch = threading.Thread(
            target=self.watchdog.run, args=watched, name="slosched-watchdog", daemon=True
        )
        watch.start()

    def submit(self, request: Request) -> Generation:
        """Queue a request and return its generation, whose updates go to the running event loop.

        With the first request of a group come all of its siblings.
        The policy may refuse the request at once, also while a step runs: see its `refusal`.
        Raises NotServingError while the server is draining or broken, or a step hangs.
        """
        loop = asyncio.get_running_loop()
        generation = Generation(request, loop)
        if request.group is not None:
            others = request.group.members[1:]
            generation.siblings = tuple(Generation(other, loop) for other in others)
        with self._wake:
            if (why := self.why_refusing) is not None:
                raise NotServingError(why)
            generation.refusal = self.scheduler.judge(request)
            self._inbox.append(generation)
            self._wake.notify()
        return generation

    def quote(self, request: Request) -> Offer:
        """Return what a request would be promised now; raise NoQuoteError without a door."""
        door, model = self._door()
        return offer_of(door, request, model, self.scheduler.limits.deadline_rule)

    def retry_after_s(self, request: Request) -> float | None:
        """Return when a rejected request should come again; None if the policy has no door."""
        try:
            door, model = self._door()
        except NoQuoteError:
            return None
        with self._wake:
            return door.retry_after_s(replace(request, arrival_s=self.now_s()), model)

    def _door(self) -> tuple[Door, LatencyModel]:
        policy, model = self.scheduler.policy, self.scheduler.latency_model
        if not isinstance(policy, Door) or model is None:
            raise NoQuoteError("the policy gives no quotes: serve with one that ends in +door")
        return policy, model

    def abort(self, request_id: str, reason: EndReason = EndReason.CLIENT) -> None:
        """End a request early; do nothing if it has already ended.

        With EndReason.STOP it counts as finished, since its text has reached a stop string.
        """
        with self._wake:
            self._inbox.append(_Abort(request_id, reason))
            self._wake.notify()

    async def operate(self, run: Callable[[Engine], T]) -> T:
        """Call `run` in the engine's thread between two steps; return or raise what it does.

        Until it returns no step runs.  Raises NotServingError while the server is draining or
        broken.
        """
        result: Future[object] = Future()
        with self._wake:
            if (why := self.why_not_serving) is not None:
                raise NotServingError(why)
            self._inbox.append(_Operation(run, result))
            self._wake.notify()
        return await asyncio.wrap_future(cast("Future[T]", result))

    def begin_drain(self, timeout_s: float) -> None:
        """Take no more requests; stop once all have ended, or abort the rest after `timeout_s`.

        Of several calls, the one with the earliest end counts, so that a drain can be cut short.
        """
        with self._wake:
            until_s = self.now_s() + timeout_s
            if self._drain_until_s is None or until_s < self._drain_until_s:
                self._drain_until_s = until_s
            self._wake.notify()

    def give_up_hung_drain(self, grace_s: float) -> None:
        """Fail all requests at the end of a drain if a step hangs, else `grace_s` after the end.

        The engine's thread is left behind.
        """
        until_s = self._drain_until_s
        if until_s is None or self.has_stopped or self.now_s() <= until_s:
            return
        if self.watchdog.hang() is not None:
            self._leave_behind("a step hung at the end of the drain")
        elif self.now_s() > until_s + grace_s:
            self._leave_behind(f"a step had not ended {grace_s:g} s after the end of the drain")

    def _leave_behind(self, why: str) -> None:
        """Fail all requests from another thread than the engine's, which hangs, and stop."""
        self._die(why)
        self._stopped.set()

    def wait_stopped(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of a drain; return False if it takes longer than `timeout_s`."""
        return self._stopped.wait(timeout_s)

    def _run(self) -> None:
        try:
            while self._broken is None and self._take_commands():
                self._turn()
            if self._broken is not None:
                self._abort_all(EndReason.FAULT)  # those that were left behind in a step
                self._report({}, self._engine.take_ended())
                self._die(self._broken)
        except BaseException as error:  # a bug in slosched: no request may be left waiting
            log.exception("the engine thread died")
            self._die(self._broken or f"its engine thread died of {_describe(error)}")
        finally:
            self._stopped.set()

    def _take_commands(self) -> bool:
        """Wait for something to do and take the new commands; return False once drained."""
        with self._wake:
            while not self._inbox and not self._engine.has_work:
                if self._drain_until_s is not None:
                    return False
                self._wake.wait()
            self._taken.extend(self._inbox)
            self._inbox.clear()
            return True

    def _taken_in_turn(self) -> Iterator[_Command]:
        """Yield each command that was taken exactly once, also if two threads ask."""
        with suppress(IndexError):
            while True:
                yield self._taken.popleft()

    def _turn(self) -> None:
        for command in self._taken_in_turn():
            if isinstance(command, Generation):
                self._generations.add(command)
                self.scheduler.queue(command.request, command.refusal)
            elif isinstance(command, _Abort):
                self._carry_out(command)
            else:
                self._operate(command)
        if self._drain_until_s is not None and self.now_s() >= self._drain_until_s:
            self._abort_all(EndReason.SHUTDOWN)
        if self._broken is None and self._engine.has_work:
            self._step(self._engine.step)
        else:
            self._report({}, self._engine.take_ended())

    def _carry_out(self, abort: _Abort) -> None:
        self.scheduler.end(abort.request_id, abort.reason, self.now_s())

    def _operate(self, operation: _Operation) -> None:
        if not operation.result.set_running_or_notify_cancel():
            return
        try:
            self._step(self._engine.settle)
        except BaseException as error:
            operation.result.set_exception(error)
            raise
        if self._broken is not None:
            operation.result.set_exception(NotServingError(self._broken))
            return
        try:
            operation.result.set_result(operation.run(self._engine))
        except BaseException as error:
            operation.result.set_exception(error)

    def _abort_all(self, reason: EndReason) -> None:
        now_s = self.now_s()
        for request in self.scheduler.unfinished():
            self.scheduler.end(request.request_id, reason, now_s)

    def _step(self, run: Callable[[], StepRecord | None]) -> None:
        """Run a step, or wait for the running one, and tell the handlers what came of it."""
        num_faults = self._engine.num_faults
        self.watchdog.began()
        try:
            record = run()
        except BaseException as error:  # a panic of a library in Rust is no Exception
            self._handle_failed_step(error, is_fault=self._engine.num_faults > num_faults)
            return
        finally:
            self.watchdog.ended()
        if record is None:
            return
        self._num_faults = 0
        self._note_first_scheduled(record)
        self.metrics.observe_step(record)
        result = record.result
        for name, part in result.prompt_logprobs.items():
            if (generation := self._generations.find(name)) is not None:
                generation.prompt_logprobs.append(part)
        whys = {**result.failed, **result.barred}
        self._note_refusals(record)
        self._report(_emitted(record), record.ended, whys, result.logprobs)
        self.steps.publish(record)

    def _handle_failed_step(self, error: BaseException, *, is_fault: bool) -> None:
        """Fail the requests of the step after a device's fault, or all requests after a policy's
        bug."""
        what = _describe(error)
        log.error("a step failed: %s", what, exc_info=error)
        ended = self._engine.take_ended()
        hits = sum(request.end_reason is EndReason.FAULT for request in ended)
        if is_fault:
            # With overlap, one failure fails two steps, and all requests of the second may be gone
            # by then.
            self._num_faults += hits > 0
            if self._num_faults >= self._max_consecutive_faults:
                self._broken = f"{self._num_faults} steps failed one after the other, with {what}"
        else:
            self._broken = f"a step could not be planned or booked, with {what}"
            # Tokens may be lost, also of requests that have finished, and cleaning up may fail.
            self._generations.fail_all(self._broken)
        if self._broken is not None:
            self._abort_all(EndReason.FAULT)
            ended += self._engine.take_ended()
        why = self._broken or what
        self._report({}, ended, {request.request_id: why for request in ended})

    def _note_first_scheduled(self, record: StepRecord) -> None:
        for chunk in record.batch.chunks:
            generation = self._generations.find(chunk.request.request_id)
            if generation is not None and generation.first_scheduled_s is None:
                generation.first_scheduled_s = start_s = record.start_s
                expected_s = self.metrics.observe_scheduled(chunk.request, start_s)
                generation.expected_ttft_s = expected_s

    def _note_refusals(self, record: StepRecord) -> None:
        """Keep what the door says of the requests that it could not judge on arrival."""
        door = self.scheduler.policy
        if not isinstance(door, Door) or not door.refusals:
            return
        for request in record.ended:
            refusal = door.refusals.get(request.request_id)
            generation = self._generations.find(request.request_id)
            if refusal is not None and generation is not None:
                generation.refusal = refusal

    def _report(
        self,
        token_ids: Mapping[str, Sequence[int]],
        ended: Iterable[Request],
        whys: Mapping[str, str] = _NO_FAULTS,
        logprobs: Mapping[str, Sequence[TokenLogprobs]] = _NO_LOGPROBS,
    ) -> None:
        """Send each handler its update, and keep the records of the requests that ended.

        `whys` tells what was wrong with requests that ended by a fault or without a token.
        """
        updates = {name: [Update(token) for token in tokens] for name, tokens in token_ids.items()}
        for name, at_tokens in logprobs.items():
            if name in updates:
                pairs = zip(updates[name], at_tokens, strict=True)
                updates[name] = [update._replace(logprobs=at) for update, at in pairs]
        over: dict[str, Request] = {}
        for request in ended:
            name = request.request_id
            self.metrics.by_promise.forget(name)
            why = whys.get(name, "") if request.end_reason in _EXPLAINED else ""
            *before, last = updates.get(name) or [Update()]
            last = last._replace(end_reason=request.end_reason, detail=why)
            updates[name] = [*before, last]
            if request.group is None or not request.group.num_unfinished:
                over[answer_id(request)] = request
        for request in over.values():
            self._record(request)
        self._generations.deliver(updates)

    def _record(self, request: Request) -> None:
        """Keep the record of a request that has ended, of a group that of the worst member."""
        members = (request,) if request.group is None else request.group.members
        rule = self.scheduler.limits.deadline_rule
        record = worst([RequestRecord.from_request(member) for member in members], rule)
        self.records.append(record)
        output_tokens = [member.num_output_tokens for member in members]
        self.metrics.observe_end(record, request, output_tokens)

    def _die(self, why: str) -> None:
        """Fail all requests that still wait, without asking the scheduler, and take no more."""
        if self._broken is None:
            log.error("the engine has failed for good: %s", why)
        with self._wake:
            self._broken = why
            inbox, self._inbox = self._inbox, []
        for command in (*self._taken_in_turn(), *inbox):
            if isinstance(command, Generation):
                self._generations.add(command)
            elif isinstance(command, _Operation) and command.result.set_running_or_notify_cancel():
                command.result.set_exception(NotServingError(why))
        self._generations.fail_all(why)


def _emitted(record: StepRecord) -> Mapping[str, Sequence[int]]:
    """Return the tokens that each request emitted in a step."""
    token_ids, num_accepted = record.result.token_ids, record.result.num_accepted
    if not num_accepted:
        return {name: (token,) for name, token in token_ids.items()}
    drafts = record.batch.drafts
    return {
        name: (*drafts.get(name, ())[: num_accepted.get(name, 0)], token)
        for name, token in token_ids.items()
    }


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
