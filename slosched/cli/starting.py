"""Ctrl-C and SIGTERM while the command line is still being imported: one line, and status 130.

This module imports next to nothing, so that it watches from the first moment on.  A container's
first process would ignore a SIGTERM for which it has no handler.
"""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

_LINE = b"stopped by Ctrl-C or SIGTERM before the command had begun\n"
_NUMBERS = (signal.SIGINT, signal.SIGTERM)

_before: dict[signal.Signals, Any] = {}
"""The handlers that were there before; empty once the command has begun."""


def begin() -> None:
    """Give the signals back to the handlers that were there before: from here on, the command's."""
    while _before:
        number, handler = _before.popitem()
        signal.signal(number, handler)


def watch() -> None:
    """End the process at once on a signal, until the command begins."""
    for number in _NUMBERS:
        # A shell has Ctrl-C ignored for commands in the background.
        if signal.getsignal(number) is not signal.SIG_IGN:
            _before[number] = signal.signal(number, _end)


def _end(_number: int, _frame: FrameType | None) -> None:
    """End without an exception, which an import that is under way could swallow or disguise."""
    os.write(2, _LINE)
    os._exit(130)
