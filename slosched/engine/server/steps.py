"""GET /steps: a stream of every executed step with its exact batch and measured time.

The engine's thread only appends a reference to each listener's queue, or counts the step as missed
if the queue is full.  It wakes no thread and formats nothing.  Handlers take the queued steps ten
times a second, so a listener costs the step loop well under a microsecond, however slowly it reads.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from slosched.engine.loop import StepRecord
from slosched.engine.step_lines import (
    MEDIA_TYPE,
    NOTHING,
    end_line,
    head_line,
    missing_line,
    step_line,
)

_MAX_WAITING_STEPS = 4096
"""The length of one listener's queue: about 40 seconds of steps of 10 ms."""
_PERIOD_S = 0.1
_MAX_STEPS_AT_ONCE = 64
"""Steps formatted before other handlers get their turn."""
_HEARTBEAT_S = 1.0
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Listener:
    """A queue of steps from the engine's thread to one reader."""

    def __init__(self, max_waiting: int) -> None:
        self._steps: deque[StepRecord] = deque()
        self._max_waiting = max_waiting
        self._num_missed = 0
        self._num_told = 0
        self._before: StepRecord | None = None
        """The step that was formatted last."""

    def offer(self, record: StepRecord) -> None:
        """Append a step without waiting; if the queue is full, only count it as missed."""
        if len(self._steps) < self._max_waiting:
            self._steps.append(record)
        else:
            self._num_missed += 1

    def take(self, at_most: int) -> list[StepRecord]:
        """Return and remove at most `at_most` of the oldest steps, in order."""
        return [self._steps.popleft() for _ in range(min(at_most, len(self._steps)))]

    def lines(self, at_most: int) -> list[bytes]:
        """Format and remove at most `at_most` of the oldest steps, in order."""
        lines = []
        for record in self.take(at_most):
            lines.append(step_line(record, self._before))
            self._before = record
        return lines

    def take_missed(self) -> int:
        """Return how many steps were missed since the last call."""
        missed = self._num_missed - self._num_told
        self._num_told += missed
        if missed:
            self._before = None  # nobody knows what the next step waited for
        return missed


class StepFeed:
    """The steps of one engine's thread, sent to any number of listeners."""

    def __init__(self, max_waiting: int = _MAX_WAITING_STEPS) -> None:
        if max_waiting < 1:
            raise ValueError(f"a listener's queue must hold at least one step, not {max_waiting}")
        self._max_waiting = max_waiting
        self._listeners: tuple[Listener, ...] = ()
        self._lock = threading.Lock()

    @property
    def num_listeners(self) -> int:
        return len(self._listeners)

    def publish(self, record: StepRecord) -> None:
        """Offer a step to every listener, unless the device had nothing to do in it.

        Only the engine's thread may call this.
        """
        if record.result.elapsed_s > 0:
            for listener in self._listeners:
                listener.offer(record)

    @contextmanager
    def listen(self) -> Iterator[Listener]:
        """Yield a listener that receives all steps until the end of the `with` block."""
        listener = Listener(self._max_waiting)
        with self._lock:
            self._listeners = (*self._listeners, listener)
        try:
            yield listener
        finally:
            with self._lock:
                self._listeners = tuple(other for other in self._listeners if other is not listener)


@dataclass(frozen=True)
class StepsResponse:
    """An ASGI response that streams steps until the client disconnects or the engine has ended."""

    feed: StepFeed
    provenance: Mapping[str, str]
    why_over: Callable[[], str | None]
    """Returns None while the engine may still run steps, else why there will be no more."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self.feed.listen() as listener:
            lines = self._lines(listener)
            response = StreamingResponse(lines, media_type=MEDIA_TYPE, headers=_HEADERS)
            await response(scope, receive, send)

    async def _lines(self, listener: Listener) -> AsyncIterator[bytes]:
        now_s = asyncio.get_running_loop().time
        yield head_line(self.provenance)
        said_s = now_s()
        while True:
            # asked before the queue is emptied, since no step may come after the answer
            why_over = self.why_over()
            while told := _told(listener):
                yield told
                said_s = now_s()
                await asyncio.sleep(0)
            if why_over is not None:
                yield end_line(why_over)
                return
            if now_s() - said_s >= _HEARTBEAT_S:
                yield NOTHING
                said_s = now_s()
            await asyncio.sleep(_PERIOD_S)


def _told(listener: Listener) -> bytes:
    """Return the lines of what has happened since the last call; empty if nothing has."""
    lines = listener.lines(_MAX_STEPS_AT_ONCE)
    # the missed steps came after all queued ones
    if not lines and (num_missed := listener.take_missed()):
        lines.append(missing_line(num_missed))
    return b"".join(lines)
