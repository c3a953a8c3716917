"""One real vLLM server: started, checked, its processor time read, stopped."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slosched.core import SloschedError

VLLM_PYTHON = Path(sys.executable if find_spec("vllm") else ".venv-vllm/bin/python")
"""The Python that has vLLM: this one, or that of .venv-vllm."""
_START_LIMIT_S = 1800.0


class ServerError(SloschedError):
    """vLLM did not start, or died."""


@dataclass(frozen=True)
class Launch:
    """The options with which a server is started."""

    model: Path
    options: tuple[str, ...]
    settings: Mapping[str, Any]
    """The `slosched` part of its additional config."""
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, port: int) -> list[str]:
        """Return the command that starts the server.

        It is not `vllm serve`, which in PyPI's CPU build looks for a package named "vllm".
        """
        return [
            *(str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", "m"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--disable-uvicorn-access-log", "--no-enable-log-requests"),
            *("--additional-config", json.dumps({"slosched": dict(self.settings)})),
            *self.options,
        ]


@dataclass(frozen=True)
class Used:
    """The processor time of a process: how long it ran, and how long it waited to run."""

    ran_s: float
    waited_s: float


@dataclass(frozen=True)
class Server:
    """One server process, up or starting."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raise ServerError if the process has ended."""
        if self.process.poll() is not None:
            raise ServerError(f"vLLM died; {self.log} ends with\n{_tail(self.log)}")

    def used(self) -> dict[str, Used]:
        """Return the processor time so far of the API server and of the engine's process."""
        engine = [_used(child) for child in _children(self.process.pid)]
        return {
            "api": _used(self.process.pid),
            "engine": Used(sum(u.ran_s for u in engine), sum(u.waited_s for u in engine)),
        }

    def await_up(self) -> None:
        """Wait until the server answers; raise ServerError if it never does."""
        limit_s = time.monotonic() + _START_LIMIT_S
        while not _is_up(self.url):
            self.check()
            if time.monotonic() > limit_s:
                raise ServerError(f"vLLM is not up after {_START_LIMIT_S:g} s: {_tail(self.log)}")
            time.sleep(1)


@contextmanager
def started(launch: Launch, log: Path) -> Iterator[Server]:
    """Start a server, yield it at once, and stop it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **launch.environment,
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            launch.command(port), stdout=output, stderr=subprocess.STDOUT, env=environment
        )
    try:
        yield Server(f"http://127.0.0.1:{port}", process, log)
    finally:
        process.terminate()
        try:
            process.wait(300)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]


def _used(pid: int) -> Used:
    """Return the processor time of a process's main thread, which does the work."""
    try:
        ran_ns, waited_ns, *_ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return Used(0.0, 0.0)
    return Used(int(ran_ns) / 1e9, int(waited_ns) / 1e9)


def _children(pid: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(c) for task in tasks for c in (task / "children").read_text().split()]
    except OSError:
        return []
