"""Room for the frames of long loops of Python calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_NUM_SLOTS = 70_000
"""Slots of 8 bytes in the frame of a wrapper: more than half a chunk of 1 MiB."""


def with_room_for_frames(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which takes as long however deep in calls it is called.

    CPython keeps frames in chunks of 16 KiB.  A call that crosses the end of one gets another from
    the operating system, and gives it back when it returns.  A loop whose calls happen to cross an
    end takes up to three times as long.  A frame that is larger than a chunk gets a larger chunk,
    and the frames of all calls in it have room behind it.
    """

    def roomy(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    roomy.__code__ = roomy.__code__.replace(co_stacksize=_NUM_SLOTS)
    return wraps(function)(roomy)
