"""A server in a process of its own, started as a user starts one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from soak.verdicts import Verdicts

_STOPPED_WITHIN_S = 60


@dataclass
class Program:
    """A running server."""

    process: subprocess.Popen[str]
    url: str
    status: int | None = None
    """The exit status, once it has ended."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def judge_end(self, verdicts: Verdicts) -> None:
        verdicts.judge("the server ends with status 0", f"{self.status}", self.status == 0)


@contextmanager
def program(
    arguments: Sequence[str], *, module: str = "slosched", log: Path | None = None
) -> Iterator[Program]:
    """Start a server, yield it when it listens, and end it with SIGTERM.

    Its log goes to the file `log`, or to this process's stderr.
    """
    command = [sys.executable, "-m", module, "serve", "--port", "0", *arguments]
    stderr = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process:
        if stderr is not None:
            os.close(stderr)
        assert process.stdout is not None
        urls = (re.findall(r" at (http\S+) under", line) for line in process.stdout)
        try:
            found = next((url for url in urls if url), None)
            if found is None:
                raise RuntimeError(f"the server did not start: {' '.join(command)}")
            running = Program(process, found[0])
            yield running
        finally:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOPPED_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
        running.status = process.returncode
