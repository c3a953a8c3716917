"""`slosched capacity`: its table, its folder of results, and its error messages."""

from __future__ import annotations

import math
import re
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from command_line import SLOSCHED, Said
from factories import make_model

from slosched.cli.capacity_report import notes
from slosched.cli.options import TraceOptions, TracePromiseOptions
from slosched.cli.search_options import windows_of
from slosched.core import SLO
from slosched.evaluate.capacity import Contender, Plan, Study, Sweep, local_pool
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import parse_ttft, synthesize

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
QUICK = [
    *("capacity", "--trace", "poisson", "-n", "40", "--seeds", "2", "--max-output-tokens", "8"),
    *("--target", "0.9", "--precision", "0.2", "--jobs", "1", "--no-bound"),
    *("--shared-rates", "2"),
]


def test_it_leaves_a_table_a_report_and_every_replay(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [*QUICK, "-p", "sarathi", "-p", "slo_aware:margin=0.1", "-o", str(out)]
    said = cli(*command)
    assert said.status == 0, said.err
    assert "slo_aware:margin=0.1" in said.out
    assert "90 % of the requests good" in said.out
    for shown in (said.out, (out / "report.html").read_text()):
        assert "Promised: TTFT 1 s, TPOT 50 ms." in shown
    names = {"report.html", "goodput.png", "attainment.svg", "curves.csv", "results.parquet"}
    assert names <= {path.name for path in out.iterdir()}
    capacities = pd.read_csv(out / "capacities.csv")
    assert list(capacities.policy) == ["sarathi", "slo_aware:margin=0.1"]
    assert (capacities.low <= capacities.requests_per_s).all()
    replays = pd.read_parquet(out / "results.parquet")
    assert {"key", "git_hash", "seed", "trace_digest", "policy_repr", "model"} <= set(replays)
    made = list(replays.made)
    assert cli(*command).status == 0
    assert list(pd.read_parquet(out / "results.parquet").made) == made, "nothing was run again"


def test_the_bound_is_above_every_policy(cli: Cli, tmp_path: Path) -> None:
    words = [word for word in QUICK if word != "--no-bound"]
    said = cli(*words, "--slo-ttft", "200ms", "-p", "fcfs", "-o", str(tmp_path))
    assert said.status == 0, said.err
    assert "any scheduler (bound)" in said.out
    told = re.search(
        r"a capacity leaves out the warm-up, (\d+) % of the replayed", " ".join(said.out.split())
    )
    assert told is not None
    assert 0 < int(told[1]) <= 50
    assert "a capacity leaves out the warm-up" in (tmp_path / "report.html").read_text()
    found = pd.read_csv(tmp_path / "capacities.csv")
    assert (found.requests_per_s < found.bound).all()
    assert (found.bound < math.inf).all()


def test_a_policy_above_the_bound_is_explained() -> None:
    windows = [synthesize("poisson", num_requests=60, slo=SLO(0.2, 0.05), prompt=256, output=2)]
    fcfs = Contender("fcfs", "fcfs", make_model(), "test", SimulationConfig())
    sweep = Sweep([fcfs], windows, Plan((0.9,), precision=0.2))
    sweep.run(local_pool(1))
    study = Study(list(sweep.measured.values()), windows)
    reached = study.capacity("fcfs", 0.9).requests_per_s
    assert reached > 0
    said = "at 90 %, fcfs is above the bound: it counts all requests of a window"
    for most, is_above in ((0.99 * reached, True), (1.01 * reached, False)):
        found = notes(study, sweep.measured, (0.9,), {0.9: most})
        assert any(note.startswith(said) for note in found) == is_above


def test_a_trace_is_judged_by_its_own_slos_unless_others_are_asked_for(cli: Cli) -> None:
    hopeless = ("--slo-ttft", "0.1ms", "--slo-tpot", "0.1ms", "-o", "hopeless.jsonl")
    assert cli("trace", "make", "poisson", "-n", "6", "--rate", "1", *hopeless).status == 0
    search = ("capacity", "--trace", "hopeless.jsonl", "--seeds", "1", *QUICK[-9:], "-p", "fcfs")
    own = cli(*search, "--max-rate", "2")
    assert "each request is judged by its own SLO" in own.out
    assert "0 %, so its capacity is 0" in own.out
    assert "Promised: TTFT 0.1 ms, TPOT 0.1 ms." in own.out
    other = cli(*search, "--max-rate", "2", "--slo-ttft", "1m", "--slo-tpot", "1m")
    assert "judged by its own SLO" not in other.out
    assert "so its capacity is 0" not in other.out


def test_the_sessions_of_a_window_are_promised_what_its_turns_are(cli: Cli) -> None:
    assert cli("trace", "make", "agents", "-n", "40", "-o", "agents.jsonl").status == 0
    windows = windows_of(
        "agents.jsonl",
        TraceOptions(num_requests=20, slo_program=parse_ttft("2x")),
        TracePromiseOptions(slo_ttft=parse_ttft("1s"), slo_tpot=0.05),
        None,
        (0, 1),
        20,
        keeps_slos=False,
    )
    for window in windows:
        turns = [r for r in window.requests if r.session_id == window.requests[0].session_id]
        expected_s = sum(2 * (1.0 + 0.05 * (turn.num_output_tokens - 1)) for turn in turns)
        expected_s += sum(turn.think_s or 0.0 for turn in turns[1:])  # none before the first
        assert turns[0].program_s == pytest.approx(expected_s)


@pytest.mark.parametrize(
    ("promise", "noted"),
    [
        ("--slo-ttft 100us --slo-tpot 50ms", ("0 %, so its capacity is 0", "too tight")),
        ("--slo-ttft 1h --slo-tpot 1h --max-rate 50", ("still reaches 90 %", "--max-rate")),
    ],
)
def test_a_capacity_that_is_none_is_explained(
    cli: Cli, tmp_path: Path, promise: str, noted: tuple[str, ...]
) -> None:
    said = cli(*QUICK, *promise.split(), "-p", "fcfs", "-o", str(tmp_path))
    assert said.status == 0, said.err
    for words in noted:
        assert words in " ".join(said.out.split())
    assert (tmp_path / "report.html").exists()


def test_a_bound_that_is_none_is_no_bound(cli: Cli, tmp_path: Path) -> None:
    """All 40 requests can wait for the end of the window, however fast they come."""
    words = [word for word in QUICK if word != "--no-bound"]
    patient = ("--slo-ttft", "1h", "--slo-tpot", "1h", "--max-rate", "50")
    said = cli(*words, *patient, "-p", "fcfs", "-o", str(tmp_path))
    assert said.status == 0, said.err
    assert "no rate is too high for 90 % of windows as short as these" in said.out
    assert "inf" not in said.out
    assert "÷ bound" not in said.out
    assert pd.read_csv(tmp_path / "capacities.csv").bound.isna().all()


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("--rate 3", ("--rate 3", "--max-rate")),
        ("--target 1.5", ("1.5",)),
        ("--precision 0", ("precision", "0.0")),
        ("--max-rate -1", ("--max-rate", "-1.0")),
        ("--max-rate 0", ("--max-rate", "0.0")),
        ("-p nonesuch", ("nonesuch", "sarathi")),
        ("--trace missing.csv", ("missing.csv",)),
    ],
)
def test_a_mistake_is_named(
    cli: Cli, tmp_path: Path, mistake: str, complaint: tuple[str, ...]
) -> None:
    said = cli(*QUICK, *mistake.split(), "-o", str(tmp_path / "out"))
    assert said.status != 0
    for words in complaint:
        assert words in said.complaint, said.complaint


def test_a_policy_that_fails_leaves_the_others_results(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "failing.py"
    module.write_text(
        "from slosched.core import Policy, SchedulerOutput\n\n\n"
        "class Failing(Policy):\n"
        "    def schedule(self, view):\n"
        "        return SchedulerOutput({'nobody': 1})\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = cli(*QUICK, "-p", "fcfs", "-p", "failing:Failing", "-o", str(tmp_path / "out"))
    assert said.status == 1
    assert "failing:Failing was given up" in said.out
    assert list(pd.read_csv(tmp_path / "out" / "capacities.csv").policy) == ["fcfs"]


def test_a_policy_that_fails_alone_is_an_error(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "failing_alone.py").write_text(
        "from slosched.core import Policy\n\n\n"
        "class Failing(Policy):\n"
        "    def schedule(self, view):\n"
        "        raise RuntimeError('out of ideas')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    said = cli(*QUICK, "-p", "failing_alone:Failing", "-o", str(tmp_path / "out"))
    assert said.status == 1
    assert "failing_alone.py, line 6, in schedule: RuntimeError: out of ideas" in said.complaint


@pytest.mark.parametrize("ends_it", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_keep_what_is_done(tmp_path: Path, ends_it: signal.Signals) -> None:
    words = ["capacity", "--trace", "poisson", "-n", "1000", "--seeds", "2", "--jobs", "1"]
    out = tmp_path / "out"
    with subprocess.Popen(
        [SLOSCHED, *words, "--no-bound", "-o", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while not (kept := num_kept(out)) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        process.send_signal(ends_it)
        said, _ = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "run the same command again" in " ".join(said.split())
    assert "Traceback" not in said
    assert num_kept(out) >= kept > 0


def test_ctrl_c_during_the_bound_leaves_the_table_that_was_measured(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_args: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("slosched.evaluate.capacity.bound._num_possible", interrupted)
    words = [word for word in QUICK if word != "--no-bound"]
    said = cli(*words, "-p", "fcfs", "-o", str(tmp_path))
    assert said.status == 130, said.err
    assert "90 % of the requests good" in said.out
    assert "run the same command again" in said.out
    assert list(pd.read_csv(tmp_path / "capacities.csv").policy) == ["fcfs"]


def num_kept(out: Path) -> int:
    if not (out / "points.sqlite").exists():
        return 0
    try:
        with sqlite3.connect(out / "points.sqlite") as connection:
            return int(connection.execute("SELECT count(*) FROM points").fetchone()[0])
    except sqlite3.OperationalError:  # its table is not there yet
        return 0
