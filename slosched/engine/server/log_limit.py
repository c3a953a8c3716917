"""A limit for log lines that clients can cause, so that they cannot fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_PERIOD_S = 1.0
_MAX_KINDS = 1000
_LOGGERS = ("asyncio", "uvicorn.error")
"""The loggers of what goes wrong with connections."""


class OncePerSecond(logging.Filter):
    """Lets a message pass once a second, with the number of those that it held back before."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._last_s: dict[str, float] = {}
        self._num_held: dict[str, int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, now_s = str(record.msg).partition("\n")[0], self._clock_s()
        if now_s - self._last_s.get(kind, -_PERIOD_S) < _PERIOD_S:
            self._num_held[kind] = self._num_held.get(kind, 0) + 1
            return False
        if len(self._last_s) >= _MAX_KINDS:
            self._last_s.clear()
            self._num_held.clear()
        self._last_s[kind] = now_s
        if num_held := self._num_held.pop(kind, 0):
            record.msg = f"{record.msg} ({num_held} more like it since)"
        return True


def limit_log_lines() -> None:
    """Let the same message about connections pass at most once a second, in this process."""
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if not any(isinstance(found, OncePerSecond) for found in logger.filters):
            logger.addFilter(OncePerSecond())
