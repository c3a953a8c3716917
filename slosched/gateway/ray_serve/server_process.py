"""A `slosched serve` in a process of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence

from slosched.core import SloschedError

_LOOK_EVERY_S = 0.2
STOP_MARGIN_S = 20.0
"""How long a server may take to end after its --drain-timeout before it is killed."""


class ServerProcessError(SloschedError):
    """A server ended before it answered."""


class ServerProcess:
    """A server on this machine, from its start to its end.  It ends with this process at last."""

    def __init__(self, arguments: Sequence[str], host: str, environment: Mapping[str, str]) -> None:
        """Start `slosched serve` with these arguments at a free port of `host`.

        It has the variables of `environment` besides those of this process.
        """
        port = free_port(host)
        self.url = f"http://{host}:{port}"
        command = [sys.executable, "-m", "slosched", "serve", *arguments]
        self._process = subprocess.Popen(
            [*command, "--host", host, "--port", str(port)], env={**os.environ, **environment}
        )
        # Its input ends with this process, even if that is killed, and it then ends the server.
        watch = ["sh", "-c", "read _; kill $0", str(self._process.pid)]
        self._watcher = subprocess.Popen(watch, stdin=subprocess.PIPE, start_new_session=True)

    def wait_until_ready(self) -> None:
        """Return when /health answers 200, however long the model takes to load.

        Raises ServerProcessError if the server ends before.
        """
        while not self._is_ready():
            self.check_runs()
            time.sleep(_LOOK_EVERY_S)

    def check_runs(self) -> None:
        """Raise ServerProcessError if the server has ended."""
        status = self._process.poll()
        if status is not None:
            self._unwatch()
            raise ServerProcessError(
                f"the server at {self.url} ended with status {status}; its log says why"
            )

    def stop(self, drain_timeout_s: float) -> None:
        """Let the server drain for its own `drain_timeout_s` and end; kill it if it does not."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(drain_timeout_s + STOP_MARGIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._unwatch()

    def _unwatch(self) -> None:
        """End the watcher of a server that has ended: another process may get its number."""
        self._watcher.kill()
        self._watcher.communicate()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def free_port(host: str) -> int:
    """Return a port of `host` that nobody listens at now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])
