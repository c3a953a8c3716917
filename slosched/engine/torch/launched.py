"""A step that the device may still compute, and how long it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from slosched.core import StepResult


class StepTimer:
    """The time from the creation of this object to `end`: by events on a GPU, else by the clock.

    An event of a GPU is reached when all that was launched before has ended. So the time of a step
    that was launched while another one ran begins with the end of that one.
    """

    def __init__(self, device: torch.device) -> None:
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._events = begin, end
        self._begin_s = time.perf_counter()
        self._end_s = self._begin_s

    def end(self) -> None:
        """Mark the end, which the device may reach later."""
        if self._events is not None:
            self._events[1].record()
        self._end_s = time.perf_counter()

    def wait(self) -> float:
        """Wait for the end and return the time in seconds."""
        if self._events is None:
            return self._end_s - self._begin_s
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


class LaunchedStep:
    """A step whose result is made once, by whichever thread asks first for it."""

    def __init__(self, collect: Callable[[], StepResult]) -> None:
        self._lock = threading.Lock()
        self._collect: Callable[[], StepResult] | None = collect
        self._outcome: StepResult | BaseException = StepResult({})

    def result(self) -> StepResult:
        """Wait for the device; return the outcome of the step, or raise its error."""
        outcome = self._waited()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def settle(self) -> None:
        """Wait for the device; an error is raised where the result is asked for."""
        self._waited()

    def _waited(self) -> StepResult | BaseException:
        with self._lock:
            if self._collect is not None:
                try:
                    self._outcome = self._collect()
                except BaseException as error:
                    self._outcome = error
                self._collect = None  # it refers to all requests of the step
            return self._outcome
