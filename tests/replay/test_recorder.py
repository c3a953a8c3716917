"""Tests that a recording is a profile at any end, and that other servers are refused."""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from live_server import Live, live
from small_server import answering

from slosched.core import Limits
from slosched.engine.step_lines import StepLinesError, head_line
from slosched.perfmodel import read_profile
from slosched.replay.recorder import RecordError, Recording, record_steps

STEP = b'{"batch": "8@0 1@9x2", "num_swapped_blocks": 3, "seconds": 0.004}\n'


@contextmanager
def traffic(server: Live) -> Iterator[None]:
    """Send requests of 20 and 5 tokens, one after the other, as long as the block lasts."""
    over = threading.Event()

    def send() -> None:
        while not over.is_set():
            server.post(prompt="x" * 20, max_tokens=5)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        yield
    finally:
        over.set()
        sender.join()


@contextmanager
def other_server(
    body: bytes, status: int = 200, kind: str = "application/x-ndjson"
) -> Iterator[str]:
    """Run a server that answers every request with `body` and closes the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body)

    with answering(Handler) as url:
        yield url


def quietly(recording: Recording, elapsed_s: float) -> None:
    pass


def test_it_records_until_its_time_is_up(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    recording = Recording(tmp_path / "new" / "traffic.csv")
    with live(limits=Limits(max_num_batched_tokens=16)) as server, traffic(server):
        record_steps(
            server.url, recording, 0.5, lambda r, elapsed_s: seen.append((r.num_steps, elapsed_s))
        )
    profile = read_profile(recording.path)
    assert len(profile.measurements) == recording.num_steps > 6
    assert seen == sorted(seen)
    assert 0.5 <= seen[-1][1] < 2
    assert recording.num_missing == 0
    assert recording.ended is None
    assert set(recording.regimes) == {"prefill", "decode"}
    found = {m.chunks for m in profile.measurements}
    assert found == {((16, 0),), ((4, 16),), *(((1, n),) for n in range(20, 24))}
    assert profile.provenance["model"] == "echo"
    assert profile.provenance["method"] == f"recorded from {server.url}"
    assert profile.provenance["date"].startswith("20")


def test_ctrl_c_keeps_what_was_recorded(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "traffic.csv")

    def interrupt(recording: Recording, elapsed_s: float) -> None:
        if recording.num_steps == 7:
            raise KeyboardInterrupt

    with live() as server, traffic(server), pytest.raises(KeyboardInterrupt):
        record_steps(server.url, recording, 60, interrupt)
    assert len(read_profile(recording.path).measurements) == recording.num_steps == 7


def test_two_recordings_at_once_and_a_shutdown_ends_both(tmp_path: Path) -> None:
    recordings = [Recording(tmp_path / f"{i}.csv") for i in range(2)]
    with live() as server:
        threads = [
            threading.Thread(target=record_steps, args=(server.url, recording, 60, quietly))
            for recording in recordings
        ]
        for thread in threads:
            thread.start()
        while server.worker.steps.num_listeners < 2:
            time.sleep(0.01)
        assert server.post(prompt="x" * 20, max_tokens=9)[0] == 200
    for thread in threads:
        thread.join()
    assert {recording.ended for recording in recordings} == {"it has shut down"}
    first, second = (read_profile(recording.path).measurements for recording in recordings)
    assert len(first) == 9
    assert first == second


def test_an_idle_server_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "traffic.csv")
    recording.path.write_text("precious")
    with live() as server:
        record_steps(server.url, recording, 0.3, quietly)
    assert recording.num_steps == 0
    assert recording.path.read_text() == "precious"


def test_a_server_that_dies_leaves_what_came(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "traffic.csv")
    with (
        other_server(head_line({"model": "m"}) + 3 * STEP + STEP[:20]) as url,
        pytest.raises(RecordError, match=r"went away after 3 steps, which are in .*traffic.csv"),
    ):
        record_steps(url, recording, 60, quietly)
    profile = read_profile(recording.path)
    assert [m.num_swapped_blocks for m in profile.measurements] == [3, 3, 3]
    assert recording.regimes == {"swap": 3}


def test_a_disk_that_gets_full_leaves_what_came(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "recorded.csv")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with live() as server, traffic(server):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            with pytest.raises(RecordError, match=r"\(File too large\) after \d+ steps, which are"):
                record_steps(server.url, recording, 30, quietly)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(read_profile(recording.path).measurements) == recording.num_steps > 0


def test_missing_steps_are_counted(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "traffic.csv")
    lines = STEP + b'{"missing": 5}\n\n' + STEP + b'{"missing": 2}\n{"end": "enough"}\n'
    with other_server(head_line({}) + lines) as url:
        record_steps(url, recording, 60, quietly)
    assert (recording.num_steps, recording.num_missing, recording.ended) == (2, 7, "enough")


def test_a_server_that_asks_for_a_key_is_given_it(tmp_path: Path) -> None:
    recording = Recording(tmp_path / "traffic.csv")
    with live(api_keys=("secret",)) as server:
        with pytest.raises(RecordError, match=r"asks for a key \(HTTP 401\).*--api-key"):
            record_steps(server.url, recording, 1, quietly)
        record_steps(server.url, recording, 0.2, quietly, "secret")


def test_no_server(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"no server answers at http://127.0.0.1:1 .*refused"):
        record_steps("http://127.0.0.1:1", Recording(tmp_path / "t.csv"), 1, quietly)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://", "http:///x"])
def test_no_address(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no address of a server"):
        record_steps(url, Recording(tmp_path / "t.csv"), 1, quietly)


@pytest.mark.parametrize(
    ("status", "kind", "complaint"),
    [
        (404, "application/json", r"tells nothing of its steps \(GET /steps: HTTP 404"),
        (200, "text/html", "HTTP 200, text/html"),
        (503, "application/json", "refused: it burns"),
    ],
)
def test_a_server_of_another_kind(status: int, kind: str, complaint: str, tmp_path: Path) -> None:
    with (
        other_server(b"it burns", status, kind) as url,
        pytest.raises(RecordError, match=complaint),
    ):
        record_steps(url, Recording(tmp_path / "t.csv"), 1, quietly)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (b'{"format": "slosched-steps/9", "provenance": {}}\n', "streams the format 'slosched-s"),
        (head_line({}) + b"[1, 2]\n", r"b'\[1, 2\]"),
        (head_line({}) + b'{"seconds": 1}\n', "'batch'"),
        (head_line({}) + STEP.replace(b"0.004", b"-1"), "-1.0 is not a positive time"),
        (head_line({}) + STEP.replace(b"0.004", b"NaN"), "nan is not a positive time"),
        (head_line({}) + STEP.replace(b"8@0", b"0@8"), "'0@8' is not a chunk"),
    ],
)
def test_lines_that_are_none(body: bytes, complaint: str, tmp_path: Path) -> None:
    recording = Recording(tmp_path / "t.csv")
    with other_server(body) as url, pytest.raises(StepLinesError, match=complaint):
        record_steps(url, recording, 1, quietly)
    assert not recording.path.exists()


def test_a_stream_without_a_head(tmp_path: Path) -> None:
    for body in (b"", STEP):
        with (
            other_server(body) as url,
            pytest.raises(RecordError, match="does not begin by saying what the server is"),
        ):
            record_steps(url, Recording(tmp_path / "t.csv"), 1, quietly)
