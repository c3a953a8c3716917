"""SIGTERM as another Ctrl-C, for measurements that keep what they have when they are stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Let SIGTERM, which `timeout` and Kubernetes send, do what Ctrl-C does in this block.

    It does so too where a shell has had Ctrl-C ignored, as for commands in the background.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)  # asyncio has its own, which ends its task
    (handler if callable(handler) else signal.default_int_handler)(number, frame)
