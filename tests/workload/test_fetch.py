"""Public traces are fetched whole and unchanged or not at all, from a real local server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from small_server import answering

from slosched.workload import PUBLIC_TRACES, FetchError, cached_trace, fetch_trace, read_trace
from slosched.workload.fetch import download
from slosched.workload.readers import FORMATS

TRACES = Path(__file__).parents[3] / "shared" / "traces"
TRACE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"2023-11-16 18:17:03.97,5,6\n" * 20_000
SHA256 = hashlib.sha256(TRACE).hexdigest()
NAME = "azure_conv_2023"


class Publisher(BaseHTTPRequestHandler):
    """Sends the trace whole, cut off, without its length, or not at all."""

    def do_GET(self) -> None:
        if self.path == "/gone.csv":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path != "/endless.csv":
            self.send_header("Content-Length", str(len(TRACE)))
        self.end_headers()
        self.wfile.write(TRACE[:100_000] if self.path == "/cut.csv" else TRACE)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with answering(Publisher) as url:
        yield url


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLOSCHED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "traces"


def files(folder: Path) -> list[str]:
    """List the names of all files, including hidden ones."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_trace_is_fetched_once_checked_and_found_in_the_cache(address, cache):
    seen = []
    fetched = fetch_trace(
        NAME,
        url=f"{address}/t.csv",
        sha256=SHA256.upper(),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert (fetched.path, fetched.sha256, fetched.was_there) == (cached_trace(NAME), SHA256, False)
    assert fetched.path.read_bytes() == TRACE
    assert files(cache) == [f"{NAME}.csv"]
    assert fetched.path.stat().st_mode & 0o777 == 0o644
    assert seen[-1] == (len(TRACE), len(TRACE))
    assert seen == sorted(seen)
    assert len(read_trace(fetched.path)) == 20_000
    # The second time, the server gets no request.
    assert fetch_trace(NAME, url=f"{address}/gone.csv", sha256=SHA256).was_there


def test_a_stream_that_does_not_say_its_length_is_taken_to_its_end(address, tmp_path):
    assert download(f"{address}/endless.csv", tmp_path / "t.csv", SHA256) == SHA256


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/t.csv", r"its sha256 is [0-9a-f]{64}, not 2f1e5b66.*--sha256"),
        ("/gone.csv", "gone.csv answers 404"),
        ("/cut.csv", r"broke off after 100,000 bytes \(of 540,040\)"),
    ],
)
def test_what_is_wrong_or_missing_or_cut_off_leaves_nothing(address, cache, path, says):
    with pytest.raises(FetchError, match=says):
        fetch_trace(NAME, url=address + path)
    assert files(cache) == []


def test_a_server_that_is_not_there_is_named(cache):
    with pytest.raises(FetchError, match=r"cannot reach http://127.0.0.1:9/t.csv: .*refused"):
        fetch_trace(NAME, url="http://127.0.0.1:9/t.csv")
    assert files(cache) == []


def test_a_file_of_that_name_is_not_overwritten_unless_that_is_asked_for(address, tmp_path):
    target = tmp_path / "mine.csv"
    target.write_text("mine")
    with pytest.raises(FetchError, match=r"mine.csv is there, but is not azure_conv_2023.*--anew"):
        fetch_trace(NAME, target, url=f"{address}/t.csv", sha256=SHA256)
    with pytest.raises(FetchError, match="broke off"):
        fetch_trace(NAME, target, url=f"{address}/cut.csv", sha256=SHA256, anew=True)
    assert target.read_text() == "mine"
    fetch_trace(NAME, target, url=f"{address}/t.csv", sha256=SHA256, anew=True)
    assert target.read_bytes() == TRACE
    assert files(tmp_path) == ["mine.csv"]


def test_names_and_checksums_that_are_none_are_refused(cache):
    with pytest.raises(ValueError, match="no public trace 'azure'; choose one of azure_conv_2023"):
        fetch_trace("azure")
    with pytest.raises(ValueError, match="64 hexadecimal digits, not 'abc'"):
        fetch_trace(NAME, sha256="abc")
    assert files(cache) == []


def test_the_table_names_a_fixed_state_of_each_file():
    for name, trace in PUBLIC_TRACES.items():
        assert trace.url.startswith("https://"), name
        assert "/main/" not in trace.url
        assert "/master/" not in trace.url
        assert trace.suffix in (".csv", ".jsonl"), name
        assert len(trace.sha256) == 64, name
        assert not {name} & FORMATS.keys()
    sums = [trace.sha256 for trace in PUBLIC_TRACES.values()]
    assert len(set(sums)) == len(sums)


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("azure_conv_2023", "azure_conv_2023.csv"),
        ("azure_code_2023", "azure_code_2023.csv"),
        ("mooncake_conversation", "mooncake_conversation.jsonl"),
    ],
)
def test_the_checksums_are_those_of_the_files_at_hand(name, file):
    path = TRACES / file
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == PUBLIC_TRACES[name].sha256
    assert path.stat().st_size == PUBLIC_TRACES[name].size_bytes
