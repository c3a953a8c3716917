"""`slosched profile --record` on a running `slosched serve`, under real traffic."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import SLOSCHED, Said, Server, serving

from slosched.perfmodel import load_model, read_profile
from slosched.perfmodel.server_time import SERVER_TIME_ORIGIN

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
GPU = "rtx4090/llama-3.1-8b"
SERVE = ("--emulate", GPU, "--policy", "fcfs", "--max-num-batched-tokens", "256")


@contextmanager
def recording(server: Server, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start `slosched profile --record` in its own process and yield it once it listens."""
    process = subprocess.Popen(
        [SLOSCHED, "profile", "--record", server.url, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        try:
            # Only its file shows whether it listens, so there has to be traffic.
            out = Path(arguments[arguments.index("-o") + 1])
            deadline_s = time.monotonic() + 30
            while not out.exists():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < deadline_s
                server.post(prompt="x" * 300, max_tokens=2)
            yield process
        finally:
            process.kill()


def test_recorded_traffic_is_fitted_and_simulates(cli: Cli) -> None:
    with (
        serving(*SERVE) as server,
        recording(server, "-o", "one.csv", "--time-limit", "5m") as one,
        recording(server, "-o", "two.csv", "--time-limit", "5m") as two,
    ):
        arrivals = ("-n", "25", "--rate", "12", "--length-scale", "0.3")
        said = cli("replay", "--trace", "azure_conv", *arrivals, "--url", server.url)
        assert said.status == 0, said.err
        time.sleep(0.5)  # the server sends its steps ten times a second
        one.send_signal(signal.SIGINT)
        said_by_one, _ = one.communicate(timeout=20)
        status, rest = server.terminate()
        said_by_two, _ = two.communicate(timeout=20)
    assert (status, rest.splitlines()[-1]) == (0, "stopped: every request has had its answer")
    assert (one.returncode, two.returncode) == (0, 0)
    first, second = read_profile(Path("one.csv")), read_profile(Path("two.csv"))
    assert f"wrote {len(first.measurements)} steps (" in said_by_one
    assert "; stopped" in " ".join(said_by_one.split())
    assert "the server ended the recording: it has shut down" in said_by_two
    assert set(second.measurements) <= set(first.measurements), "it came later"
    assert {m.regime for m in second.measurements} == {"decode", "prefill", "mixed"}

    provenance = second.provenance
    assert provenance["method"] == f"recorded from {server.url}"
    assert provenance["origin"] == f"emulated from {GPU}, nothing was computed"
    assert provenance["policy"] == "fcfs"
    assert provenance["limits"] == "256 tokens and 256 requests"

    assert "the server adds" in said_by_two
    assert second.server_time.per_step_host_s > 0
    assert second.server_time.per_request_s == second.server_time.per_step_device_s == 0

    said = cli("fit", "two.csv", "-o", "model.json", "--form", "linear")
    assert said.status == 0, said.err
    truth, fitted = load_model(GPU), load_model("model.json")
    assert all(m.seconds >= truth.predict(m.shape) for m in second.measurements)
    assert fitted.predict(second.measurements[0].shape) > 0
    assert fitted.server_time == second.server_time
    assert fitted.noise > 0
    said = cli("replay", "--latency-model", "model.json", "-n", "20", "--rate", "2")
    assert said.status == 0, said.err


@pytest.mark.cost
@pytest.mark.slow  # it plays traffic for three quarters of a minute
def test_a_recording_gives_the_emulated_model_again(cli: Cli) -> None:
    """Each emulated step takes the time that its model predicts; on a busy machine it takes longer."""
    with (
        serving(*SERVE) as server,
        recording(server, "-o", "steps.csv", "--time-limit", "5m") as process,
    ):
        arrivals = ("-n", "25", "--rate", "12", "--length-scale", "0.3")
        said = cli("replay", "--trace", "azure_conv", *arrivals, "--url", server.url)
        assert said.status == 0, said.err
        server.terminate()
        process.communicate(timeout=20)
    said = cli("fit", "steps.csv", "-o", "model.json", "--form", "linear")
    assert said.status == 0, said.err
    truth, fitted = load_model(GPU), load_model("model.json")
    shapes = [m.shape for m in read_profile(Path("steps.csv")).measurements]
    ratios = sorted(fitted.predict(shape) / truth.predict(shape) for shape in shapes)
    assert 0.97 < ratios[len(ratios) // 2] < 1.05


def test_the_time_limit_an_idle_server_and_a_file_that_exists(cli: Cli) -> None:
    with serving(*SERVE) as server:
        record = ("profile", "--record", server.url, "-o", "t.csv", "--time-limit")
        said = cli(*record, "0.2s")
        assert said.status == 1
        assert f"the server at {server.url} ran no step" in said.complaint
        assert not Path("t.csv").exists()
        with recording(server, "-o", "t.csv", "--time-limit", "1s") as process:
            told, _ = process.communicate(timeout=20)
        assert process.returncode == 0, told
        recorded = Path("t.csv").read_text()
        said = cli(*record, "1s")
        assert said.status == 1
        assert "t.csv exists; name another file, or replace it with --overwrite" in said.complaint
        assert Path("t.csv").read_text() == recorded


def test_the_time_that_the_server_adds_is_not_said_to_be_the_emulated_servers(cli: Cli) -> None:
    """A bundled model says where its server's time comes from; this server's time was measured."""
    assert SERVER_TIME_ORIGIN in load_model("h100/llama-3.1-8b").provenance
    with (
        serving("--emulate", "h100/llama-3.1-8b") as server,
        recording(server, "-o", "t.csv", "--time-limit", "1s") as process,
    ):
        told, _ = process.communicate(timeout=20)
    assert process.returncode == 0, told
    profile = read_profile(Path("t.csv"))
    assert profile.server_time.per_step_host_s > 0
    assert SERVER_TIME_ORIGIN not in profile.provenance


def test_no_server_and_a_broken_off_one(cli: Cli) -> None:
    said = cli("profile", "--record", "http://127.0.0.1:1", "-o", "t.csv")
    assert said.status == 1
    assert "no server answers at http://127.0.0.1:1" in said.complaint
    said = cli("profile", "--record", "127.0.0.1:8000", "-o", "t.csv")
    assert said.status == 2
    assert "'127.0.0.1:8000' is no address of a server; write http://host:port" in said.complaint
    with serving(*SERVE) as server, recording(server, "-o", "t.csv") as process:
        server.process.kill()
        told, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "went away after" in told
    assert read_profile(Path("t.csv")).measurements
