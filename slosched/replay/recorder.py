"""A recorder of a running server's steps, so that real traffic can refit the latency model."""

from __future__ import annotations

import http.client
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from slosched.core import SloschedError
from slosched.engine.step_lines import (
    MEDIA_TYPE,
    PATH,
    End,
    Head,
    Line,
    Missing,
    Step,
    parse_line,
)
from slosched.perfmodel import Profile, ServerTime, write_profile
from slosched.perfmodel.measurement import append_measurement
from slosched.replay.keys import KEY_STATUSES, key_headers, why_no_key

_SILENCE_S = 30.0
"""A server that is alive sends at least an empty line every second."""


class RecordError(SloschedError):
    """There is no server whose steps could be recorded, or it went away."""


@dataclass
class Recording:
    """A recording in progress: its file, and counts of the steps so far."""

    path: Path
    regimes: Counter[str] = field(default_factory=Counter)
    """Numbers of steps by `Measurement.regime`."""
    num_missing: int = 0
    """Steps that the server ran while this reader was too slow to receive them."""
    ended: str | None = None
    """The reason why the server ended the recording; None if it did not."""
    plans_ahead: bool = False
    """Whether the server plans each step while the one before it runs."""
    waits_s: list[float] = field(default_factory=list)
    """How long the device waited before each step for which it did not have to wait for work."""

    @property
    def num_steps(self) -> int:
        return self.regimes.total()

    @property
    def server_time(self) -> ServerTime:
        """Return what the server added to its steps; a recording cannot tell it of requests.

        What the device waits for although the server plans ahead is not hidden.
        """
        waited_s = statistics.median(self.waits_s) if self.waits_s else 0.0
        if self.plans_ahead:
            return ServerTime(per_step_device_s=waited_s)
        return ServerTime(per_step_host_s=waited_s)


class OnProgress(Protocol):
    def __call__(self, recording: Recording, elapsed_s: float) -> None: ...


def record_steps(
    url: str,
    recording: Recording,
    time_limit_s: float,
    on_progress: OnProgress,
    api_key: str | None = None,
) -> None:
    """Write every step of the server at `url` to `recording.path` as it comes.

    Returns after `time_limit_s`, to within a second, or when the server has shut down.  The file is
    begun with the first step and always holds all steps recorded so far, so that any end (Ctrl-C
    too) leaves a profile.  Raises RecordError if no slosched server answers, if it asks for another
    key than `api_key`, if the connection breaks, or if the file cannot be written.
    """
    start_s = time.monotonic()
    with _lines(url, api_key) as lines:
        head = next(lines, None)
        if not isinstance(head, Head):
            raise RecordError(f"{url}{PATH} does not begin by saying what the server is")
        date = datetime.now(UTC).isoformat(timespec="seconds")
        provenance = {**head.provenance, "method": f"recorded from {url}", "date": date}
        recording.plans_ahead = head.provenance.get("overlap") == "yes"
        for line in lines:
            try:
                _note(line, recording, provenance)
            except OSError as error:
                raise RecordError(
                    f"{recording.path} cannot be written ({error.strerror}) "
                    f"{_what_is_kept(recording)}"
                ) from error
            elapsed_s = time.monotonic() - start_s
            on_progress(recording, elapsed_s)
            if recording.ended is not None or elapsed_s >= time_limit_s:
                return
    raise RecordError(f"the server at {url} went away {_what_is_kept(recording)}")


def _note(line: Line | None, recording: Recording, provenance: dict[str, str]) -> None:
    if isinstance(line, Step):
        if not recording.num_steps:
            recording.path.parent.mkdir(parents=True, exist_ok=True)
            write_profile(Profile((), provenance), recording.path)
        append_measurement(line.measurement, recording.path)
        recording.regimes[line.measurement.regime] += 1
        if line.waited_s is not None:
            recording.waits_s.append(line.waited_s)
    elif isinstance(line, Missing):
        recording.num_missing += line.num_steps
    elif isinstance(line, End):
        recording.ended = line.reason


def _what_is_kept(recording: Recording) -> str:
    if not recording.num_steps:
        return "before the first step"
    return f"after {recording.num_steps} steps, which are in {recording.path}"


@contextmanager
def _lines(url: str, api_key: str | None) -> Iterator[Iterator[Line | None]]:
    """Yield the lines that the server streams, until the connection ends or breaks."""
    connection, path = _connection(url)
    try:
        try:
            connection.request("GET", path, headers=key_headers(api_key))
            response = connection.getresponse()
        except (http.client.HTTPException, OSError) as error:
            raise RecordError(
                f"no server answers at {url} ({getattr(error, 'strerror', None) or error}); "
                "start one with `slosched serve`"
            ) from error
        with response:
            _check(response, url, api_key)
            yield _read(response)
    finally:
        connection.close()


def _connection(url: str) -> tuple[http.client.HTTPConnection, str]:
    """Return a connection that is not open yet, and the path to ask for."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no address of a server; write http://host:port")
    is_secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=_SILENCE_S), parts.path.rstrip("/") + PATH


def _check(response: http.client.HTTPResponse, url: str, api_key: str | None) -> None:
    if response.status in KEY_STATUSES:
        raise RecordError(f"{url}: {why_no_key(response.status, api_key)}")
    if response.status == 503:
        raise RecordError(f"{url} refused: {response.read().decode(errors='replace'):.300}")
    if response.status != 200 or response.headers.get_content_type() != MEDIA_TYPE:
        raise RecordError(
            f"{url} tells nothing of its steps (GET {PATH}: HTTP {response.status}, "
            f"{response.headers.get_content_type()}); only servers that `slosched serve` started do"
        )


def _read(response: http.client.HTTPResponse) -> Iterator[Line | None]:
    while True:
        try:
            line = response.readline()
        except (http.client.HTTPException, OSError):
            return
        if not line.endswith(b"\n"):
            return
        yield parse_line(line)
