"""The command line and the server as a user runs them, and what they print."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SLOSCHED = str(Path(sys.executable).with_name("slosched"))
"""The installed script."""
_URL = re.compile(r"(?<=\bat\s)http://127\.0\.0\.1:\d+")
_LAST_WORDS = re.compile(r"Ctrl-C drains\s+and\s+stops.*\n")
"""The end of what a server prints when it is ready."""
_STOP_TIMEOUT_S = 40


@dataclass(frozen=True)
class Said:
    """The output of a command, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """Return standard error as one line, without the frame that typer draws around its errors."""
        return " ".join(re.sub("[─│╭╮╰╯]", " ", self.err).split())


@dataclass(frozen=True)
class Server:
    """A running `slosched serve` or `slosched route` in its own process."""

    process: subprocess.Popen[bytes]
    url: str
    announced: str
    """Everything that it printed until it was ready."""
    output: Path
    """The file that it prints to.  A pipe would fill up and stop a server that logs much."""

    def get(self, path: str) -> tuple[int, str]:
        return _ask(urllib.request.Request(self.url + path))

    def post(
        self,
        path: str = "/v1/completions",
        /,
        *,
        headers: Mapping[str, str] | None = None,
        **body: Any,
    ) -> tuple[int, Any]:
        """Return the status and the JSON document of the answer."""
        status, text = self.post_raw(json.dumps(body).encode(), path, headers)
        return status, json.loads(text)

    def post_raw(
        self,
        body: bytes,
        path: str = "/v1/completions",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, str]:
        return _ask(urllib.request.Request(self.url + path, data=body, headers=dict(headers or {})))

    def stream(self, path: str = "/v1/completions", /, **body: Any) -> list[Any]:
        """Return the events of one stream, without the [DONE] at its end."""
        status, text = self.post_raw(json.dumps({**body, "stream": True}).encode(), path)
        assert status == 200, text
        return parse_events(text)

    def metric(self, name: str, labels: str = "") -> float:
        """Return the value of the one sample with this name whose labels end with `labels`."""
        pattern = rf"^{re.escape(name)}\{{[^}}]*{re.escape(labels)}\}} (\S+)$"
        (value,) = re.findall(pattern, self.get("/metrics")[1], flags=re.MULTILINE)
        return float(value)

    def terminate(self) -> tuple[int, str]:
        """Send SIGTERM; return the exit status and what the server printed until it ended."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> tuple[int, str]:
        """Return the exit status, and what the server printed until it ended."""
        status = self.process.wait(_STOP_TIMEOUT_S)
        return status, self.output.read_text().removeprefix(self.announced)


@contextmanager
def serving(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start a server on a free port, yield it once it is ready, and kill it at the end."""
    with _listening("serve", "--port", "0", *arguments, env=env) as server:
        yield server


@contextmanager
def routing(urls: Sequence[str], *arguments: str) -> Iterator[Server]:
    """Start `slosched route` to these URLs, as `serving` starts a server."""
    replicas = [word for url in urls for word in ("--url", url)]
    with _listening("route", "--port", "0", *replicas, *arguments) as server:
        yield server


@contextmanager
def _listening(*words: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    command = [SLOSCHED, *words]
    with TemporaryDirectory() as folder:
        output = Path(folder) / "output.txt"
        with (
            output.open("ab") as written,
            subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=env) as process,
        ):
            try:
                yield _ready(process, output)
            finally:
                process.kill()


def _ready(process: subprocess.Popen[bytes], output: Path) -> Server:
    """Wait until the server has printed all that it says at its start."""
    while True:
        has_ended = process.poll() is not None
        said = output.read_text()
        if _LAST_WORDS.search(said) and (found := _URL.search(said)) is not None:
            return Server(process, found[0], said, output)
        assert not has_ended, f"the server ended before it was ready: {said}"
        time.sleep(0.05)


def parse_events(text: str) -> list[Any]:
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _ask(request: urllib.request.Request) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
