"""A server process of the demo."""

from __future__ import annotations

import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.markup import escape

from slosched.cli.console import console
from slosched.cli.demo.setup import (
    HOST_KV_TOKENS,
    KV_TOKENS,
    LIMITS,
    RULE,
    SPECS,
    DemoError,
    Files,
    quoted,
)

_START_TIMEOUT_S = 180.0


@contextmanager
def running_server(
    policy: str, latency_model: Path, model: str, threads: int, files: Files
) -> Iterator[str]:
    """Start a server process, yield its URL once it is ready, and drain and stop it at the end."""
    port = _free_port()
    log = files.server_log(policy)
    command = (
        f"serve --model {quoted(model)} --policy {SPECS[policy]}"
        f" --latency-model {quoted(latency_model)} --threads {threads}"
        f" --max-num-batched-tokens {LIMITS.max_num_batched_tokens}"
        f" --max-num-seqs {LIMITS.max_num_seqs} --kv-tokens {KV_TOKENS}"
        f" --host-kv-tokens {HOST_KV_TOKENS} --deadline-rule {RULE} --port {port}"
    )
    console.print(f"[bold green]$[/] slosched {escape(command)} &")
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "slosched", *shlex.split(command)],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            with console.status("waiting for the server"):
                _wait_until_ready(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise DemoError(f"the server did not start; it said:\n{log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])
