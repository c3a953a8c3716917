"""`slosched plan`: its table, its JSON, its folder, and its error messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from command_line import Said

from slosched.cli.options import TraceOptions, TracePromiseOptions
from slosched.cli.search_options import windows_of
from slosched.workload import synthesize

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
QUICK = ("plan", "--trace", "poisson", "-n", "60", "--seeds", "2", "--jobs", "1")
PROMISE = ("--slo-ttft", "1s", "--slo-tpot", "60ms")
GPUS = ("--gpu", "h100=2.5", "--gpu", "l40s=0.9")


def test_it_finds_a_fleet_and_says_it_to_people_and_to_scripts(cli: Cli, tmp_path: Path) -> None:
    command = [*QUICK, *GPUS, "--rate", "60", "-p", "fcfs", *PROMISE, "-o", "out"]
    said = cli(*command)
    assert said.status == 0, said.err
    assert "cheapest" in said.out
    assert "one replica more" in said.out
    assert "Promised: TTFT 1 s, TPOT 60 ms." in said.out
    names = {"report.html", "frontier.png", "frontier.svg", "plan.json", "fleets.csv"}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}
    again = cli(*command, "--json")
    assert again.status == 0, again.err
    found = json.loads(again.out)
    assert found == json.loads((tmp_path / "out" / "plan.json").read_text())
    assert found["best"]["attainment"] >= 0.99
    fleets = pd.read_csv(tmp_path / "out" / "fleets.csv")
    assert len(found["tried"]) == len(fleets)
    enough = fleets[fleets.attainment >= 0.99]
    assert found["best"]["price_per_hour"] == pytest.approx(enough.price_per_hour.min())


def test_a_promise_that_no_number_of_replicas_keeps_is_told_with_the_reason(cli: Cli) -> None:
    said = cli(*QUICK, *GPUS, "--slo-tpot", "1ms")
    assert said.status == 1
    assert "h100: no number of replicas has more than" in said.complaint
    assert "miss their TPOT, as a decode takes" in said.complaint
    assert "l40s: no number" in said.complaint


def test_a_gpu_that_is_too_slow_is_left_out_with_a_note(cli: Cli) -> None:
    said = cli(*QUICK, *GPUS, "--rate", "20", "--slo-tpot", "15ms", "--json")
    assert said.status == 0, said.err
    found = json.loads(said.out)
    assert set(found["out_of_reach"]) == {"l40s"}
    assert set(found["best"]["replicas"]) == {"h100/llama-3.1-8b"}
    assert any("l40s" in note for note in found["notes"])


@pytest.mark.parametrize("number", [1, 3])
def test_a_trace_without_a_rate_is_refused(cli: Cli, number: int) -> None:
    rows = "".join("0,10,5\n" for _ in range(number))
    Path("t.csv").write_text(f"arrival_s,input_tokens,output_tokens\n{rows}")
    said = cli("plan", "--trace", "t.csv", "-n", str(number), "--seeds", "1", *GPUS, "--jobs", "1")
    assert said.status == 1
    assert "trace 't' has no rate to change" in said.complaint
    assert not Path("runs").exists(), "it is refused before the search begins"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "h10=1"], "did you mean h100"),
        (["--gpu", "h100"], "is not NAME=PRICE"),
        ([*GPUS, "--latency-model", "l4/llama-3.1-8b"], "name latency models with --gpu"),
        ([*GPUS, "--gpu", "h100/llama-3.1-8b=3"], "has a price already"),
        ([*GPUS, "--rate", "-1"], "must be a positive number of requests/s"),
        ([*GPUS, "--router", "robin"], "no router 'robin'"),
        ([*GPUS, "-p", "fcsf"], "did you mean fcfs"),
        (["--gpu", "l40s=1", "--rate", "200", "--max-replicas", "1"], "raise --max-replicas"),
        ([], "Missing option"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused(
    cli: Cli, arguments: list[str], message: str
) -> None:
    said = cli(*QUICK, *arguments)
    assert said.status != 0
    assert message in said.complaint


@pytest.mark.parametrize(
    ("source", "titled"),
    [
        ("azure_conv --rate 30 --duration 4s", "120 requests of azure_conv at 30/s"),
        ("poisson --rate 30 --thin-to 10 -n 90", "30 requests of poisson at 10/s"),
    ],
)
def test_the_windows_are_those_of_a_replay_at_that_rate(cli: Cli, source: str, titled: str) -> None:
    said = cli("plan", "--trace", *source.split(), "--gpu", "h100=2.5", "--seeds", "1", "-j", "1")
    assert said.status == 0, said.err
    assert titled in said.out


@pytest.mark.parametrize("kind", ["sessions", "daily"])
def test_a_rate_leaves_the_pauses_of_people_and_the_length_of_the_day(kind: str) -> None:
    """At 20 times a trace's own rate there are more sessions, not hastier ones."""
    arrivals = TraceOptions(num_requests=50, rate=20.0)
    promise = TracePromiseOptions()
    (window,) = windows_of(
        kind, arrivals, promise, None, (3,), 50, keeps_slos=False, takes_rate=True
    )
    assert window.requests == synthesize(kind, num_requests=50, rate=20.0, seed=3).requests
