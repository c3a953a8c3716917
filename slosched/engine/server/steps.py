"""GET /steps: every executed step, its exact batch and what the device took, to whoever listens.

The engine's thread only appends a reference to a listener's queue, or counts a step that found it
full.  It wakes nobody and formats nothing: handlers come by ten times a second and take what is
there, so a listener costs the step loop well under a microsecond, however slow it reads.
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
"""Of one listener: 40 seconds of steps of 10 ms."""
_PERIOD_S = 0.1
_MAX_STEPS_AT_ONCE = 64
"""Then other handlers have their turn."""
_HEARTBEAT_S = 1.0
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Listener:
    """Steps on their way from the engine's thread to one reader."""

    def __init__(self, max_waiting: int) -> None:
        self._steps: deque[StepRecord] = deque()
        self._max_waiting = max_waiting
        self._num_missed = 0
        self._num_told = 0

    def offer(self, record: StepRecord) -> None:
        """Never waits; a step that finds the queue full is counted and forgotten."""
        if len(self._steps) < self._max_waiting:
            self._steps.append(record)
        else:
            self._num_missed += 1

    def take(self, at_most: int) -> list[StepRecord]:
        """The oldest steps, in order."""
        return [self._steps.popleft() for _ in range(min(at_most, len(self._steps)))]

    def take_missed(self) -> int:
        """How many steps were lost since the last call."""
        missed = self._num_missed - self._num_told
        self._num_told += missed
        return missed


class StepFeed:
    """From one engine's thread to any number of listeners."""

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
        """Offer a step to everyone, unless the device had nothing to do in it.

        Called by the engine's thread alone.
        """
        if record.result.elapsed_s > 0:
            for listener in self._listeners:
                listener.offer(record)

    @contextmanager
    def listen(self) -> Iterator[Listener]:
        """Steps from now until the end of the block."""
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
    """An ASGI response that tells of steps until the client goes or the engine has ended."""

    feed: StepFeed
    provenance: Mapping[str, str]
    why_over: Callable[[], str | None]
    """None while the engine may still run steps."""

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
            why_over = self.why_over()  # before the queue is emptied: no step may come after
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
    """Lines of what has happened since the last time; empty if nothing has."""
    lines = [step_line(record) for record in listener.take(_MAX_STEPS_AT_ONCE)]
    if not lines and (num_missed := listener.take_missed()):  # they came after all that waited
        lines.append(missing_line(num_missed))
    return b"".join(lines)
