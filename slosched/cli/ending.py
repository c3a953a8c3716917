"""How a server that has failed ends its process: with status 1, before Python tidies up."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


class EndingAtOnce:
    """Ends the process at once if a block of code fails.

    A thread may have been left behind in a step of the device.  Python would stop it in the middle
    of torch's code, which aborts the process (status 134), or would wait for the device.

    Functions of atexit are called last to first.  So make this object before a library registers
    what it still has to do at the end, such as sending traces.
    """

    def __init__(self) -> None:
        self._has_failed = False
        atexit.register(self._end)

    @contextmanager
    def on(self, kind: type[Exception]) -> Iterator[None]:
        """Let errors of this kind through, and have them end the process."""
        try:
            yield
        except kind:
            self._has_failed = True
            raise

    def _end(self) -> None:
        if self._has_failed:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
