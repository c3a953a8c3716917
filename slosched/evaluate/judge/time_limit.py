"""The time limit of a verdict: it also ends a policy that does not return from a call."""

from __future__ import annotations

import math
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from slosched.core import Policy, SloschedError

CALL_TIME_S = 3.0
"""The time after the limit in which a call of a policy must return; else the policy is stuck."""
_LOOK_AGAIN_S = 0.1


class OutOfTimeError(SloschedError):
    """The time limit is over; what runs was given up."""


class StuckPolicyError(SloschedError):
    """A policy does not return from a call."""


class _AlarmError(BaseException):
    """Ends what runs, which may be a policy that catches every Exception."""

    def __init__(self, is_stuck: bool) -> None:
        super().__init__(is_stuck)
        self.is_stuck = is_stuck


@dataclass(frozen=True)
class TimeLimit:
    """A length of time, and when it is over."""

    length_s: float
    end_s: float
    """The end on the clock of time.monotonic, which all processes of a machine share."""

    @classmethod
    def from_now(cls, length_s: float) -> TimeLimit:
        """Return the limit that ends after this length of time."""
        return cls(length_s, time.monotonic() + length_s)

    def is_over(self) -> bool:
        """Tell whether the time is over."""
        return time.monotonic() >= self.end_s

    def stuck(self, policy: str) -> StuckPolicyError:
        """Return the error for a policy that does not return from a call."""
        return StuckPolicyError(
            f"{policy} did not return from a call, which was under way at the end of the time "
            f"limit of {self.length_s:g} s and {CALL_TIME_S:g} s later.  Look for a loop that may "
            "not end; if the call is only slow, give more time with --time-limit"
        )

    @contextmanager
    def ending(self, policy: str) -> Iterator[None]:
        """End what runs inside when the time is over.

        Raises StuckPolicyError if a call of the policy goes on for CALL_TIME_S, else
        OutOfTimeError.  Both have the traceback of what was ended.  Where there is no alarm, which
        is on Windows and in other threads than the main one, it ends nothing.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if self == NO_LIMIT or not is_main or not hasattr(signal, "setitimer"):
            yield
            return
        if self.is_over():
            raise OutOfTimeError(f"the time limit of {self.length_s:g} s was over before")
        before = signal.signal(signal.SIGALRM, _Alarm(self.end_s))
        signal.setitimer(
            signal.ITIMER_REAL, max(self.end_s - time.monotonic(), 1e-6), _LOOK_AGAIN_S
        )
        try:
            yield
        except _AlarmError as alarm:
            told = f"the time limit of {self.length_s:g} s is over"
            error = self.stuck(policy) if alarm.is_stuck else OutOfTimeError(told)
            raise error.with_traceback(alarm.__traceback__) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


NO_LIMIT = TimeLimit(math.inf, math.inf)


class _Alarm:
    """Raises _AlarmError as soon as the call of a policy in which it finds the process is over."""

    def __init__(self, end_s: float) -> None:
        self._stuck_at_s = end_s + CALL_TIME_S
        self._call: FrameType | None = None
        """The call that was under way when the time was over."""

    def __call__(self, _signal: int, frame: FrameType | None) -> None:
        if _would_be_ignored(frame):
            return  # the next look is soon
        call = _call_of_policy(frame)
        if call is None or (self._call is not None and call is not self._call):
            raise _AlarmError(is_stuck=False)
        self._call = call
        if time.monotonic() >= self._stuck_at_s:
            raise _AlarmError(is_stuck=True)


def _would_be_ignored(frame: FrameType | None) -> bool:
    """Tell whether Python would only print an error that is raised here.

    It does so in finalisers and in callbacks of weak references.
    """
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def _call_of_policy(frame: FrameType | None) -> FrameType | None:
    """Return the outermost frame on the stack that is a policy's method; None if there is none."""
    found = None
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), Policy):
            found = frame
        frame = frame.f_back
    return found
