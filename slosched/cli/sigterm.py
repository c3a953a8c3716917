"""SIGTERM as another Ctrl-C, for commands that say, or keep, something when they are stopped."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import typer

log = logging.getLogger(__name__)


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


@contextmanager
def stopped_aloud() -> Iterator[None]:
    """Log that a server was stopped, and exit with status 130, where it does not drain.

    While it serves, it has other handlers for Ctrl-C and SIGTERM, which drain it.
    """
    with sigterm_as_ctrl_c():
        try:
            yield
        except KeyboardInterrupt:
            log.info("stopped by Ctrl-C or SIGTERM while it was not serving")
            raise typer.Exit(130) from None


def _interrupt(number: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)  # asyncio has its own, which ends its task
    (handler if callable(handler) else signal.default_int_handler)(number, frame)
