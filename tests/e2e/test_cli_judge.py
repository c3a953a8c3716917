"""`slosched judge` on a policy in a file, against requests of a small trace."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import SLOSCHED, Said

from slosched.evaluate.judge import scenarios
from slosched.workload import synthesize, write_trace

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
SHORTEST_FIRST = '''
from collections.abc import Callable
from dataclasses import dataclass

from slosched import DecodeFirst, Request, SchedulerView


@dataclass
class ShortestFirst(DecodeFirst):
    """Every decode, then the shortest prompt."""

    def prefill_order(self, view: SchedulerView) -> Callable[[Request], float]:
        return lambda request: request.num_prompt_tokens
'''
LOTTERY = """
import random

from slosched import BatchBuilder, Policy


class Lottery(Policy):
    def schedule(self, view):
        batch = BatchBuilder(view)
        batch.add_preempting(view.running, victims=list(view.running))
        if batch.preempted or batch.swapped_out:
            return batch.build()
        waiting = [*view.swapped, *view.waiting]
        random.shuffle(waiting)
        for request in waiting:
            batch.admit(request)
        return batch.build()
"""
STUCK = """
from pathlib import Path

from slosched.policy.fcfs import FCFS


class Stuck(FCFS):
    def schedule(self, view):
        Path("is_stuck").touch()
        while True:
            try:
                pass
            except Exception:
                pass
"""
SLOW = """
import time

from slosched.policy.fcfs import FCFS


class Slow(FCFS):
    def schedule(self, view):
        time.sleep(0.02)
        return super().schedule(view)
"""
_BUSY_S = 30.0
"""The time that a busy machine may take to end a command."""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "requests.csv"
    write_trace(synthesize("poisson", num_requests=1600, output=8), path)
    return str(path)


@pytest.mark.slow
def test_a_policy_in_a_file_gets_its_verdict(cli: Cli, trace: str) -> None:
    Path("mine.py").write_text(SHORTEST_FIRST, encoding="utf-8")
    common = ("--trace", trace, "--scenario", "conv-tight", "--jobs", "1")
    said = cli("judge", "mine.py", "--against", "fcfs", *common, "-o", "verdict.json")
    assert said.status == 0, said.err
    assert "mine.py obeys the laws" in said.out
    assert "conv-tight" in said.out
    document = json.loads(Path("verdict.json").read_text())
    assert document["verdict"] in " ".join(said.out.split())
    assert [row["load"] for row in document["rows"]] == [1.0, 2.0]
    assert document["rows"][1]["verdict"] == "ahead", "short prompts first, beyond the knee"


def test_answers_as_csv(cli: Cli, tmp_path: Path, trace: str) -> None:
    common = ("--trace", trace, "--scenario", "conv-tight", "--jobs", "1")
    said = cli("judge", "fcfs", "--against", "fcfs", *common, "-o", str(tmp_path / "v.csv"))
    assert said.status == 0, said.err
    with (tmp_path / "v.csv").open() as file:
        played = csv.DictReader(file)
        assert {row["verdict"] for row in played} == {"level"}
    said = cli("judge", "fcfs", *common, "--time-limit", "1ms", "-o", str(tmp_path / "none.csv"))
    assert said.status == 0, said.err
    with (tmp_path / "none.csv").open() as file:
        none = csv.DictReader(file)
        assert (none.fieldnames, list(none)) == (played.fieldnames, []), (
            "no answer in so short a time"
        )


def test_a_broken_policy_is_told_which_law_it_broke(cli: Cli) -> None:
    Path("lottery.py").write_text(LOTTERY, encoding="utf-8")
    said = cli("judge", "lottery.py", "--quick")
    assert said.status == 1
    assert "lottery.py breaks a law of policies: the same seed gave other decisions" in said.err


@pytest.mark.parametrize(
    ("limit_s", "how"),
    [
        pytest.param(3, "", id="while it checks the laws"),
        pytest.param(6, "--no-laws --jobs 2", id="in a worker"),
    ],
)
def test_a_policy_that_does_not_return_from_a_call_is_named_with_its_place(
    cli: Cli, limit_s: int, how: str
) -> None:
    Path("stuck.py").write_text(STUCK, encoding="utf-8")
    command = ("judge", "stuck.py", "--scenario", "conv-tight", *how.split(), "--time-limit")
    said = cli(*command, f"{limit_s}s")
    while not Path("is_stuck").exists():  # A busy machine had not come to it.
        limit_s *= 3
        said = cli(*command, f"{limit_s}s")
    assert said.status == 1
    assert re.search(r"/stuck.py, line \d+, in schedule", said.complaint), said.err
    assert "stuck.py did not return from a call" in said.complaint
    assert f"the time limit of {limit_s} s and 3 s later" in said.complaint


def test_a_slow_policy_is_not_taken_for_a_stuck_one(cli: Cli) -> None:
    Path("slow.py").write_text(SLOW, encoding="utf-8")
    said = cli("judge", "slow.py", "--scenario", "conv-tight", "--time-limit", "2s", "--jobs", "1")
    assert said.status == 0, said.err
    assert "the laws of policies were not all checked in time" in " ".join(said.out.split())
    assert "stopped by the time limit of 2 s" in " ".join(said.out.split())
    assert "┃" not in said.out, "a table without an answer"


def test_ctrl_c_ends_it_though_a_policy_does_not_return(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(STUCK, encoding="utf-8")
    command = [SLOSCHED, "judge", "stuck.py", "--no-laws", "--jobs", "2", "--time-limit", "1h"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    while not (tmp_path / "is_stuck").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    try:
        said, _ = process.communicate(timeout=_BUSY_S)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "stopped by Ctrl-C" in " ".join(said.split())


@pytest.mark.parametrize("policy", [(), ("fcfs",)], ids=["alone", "with a policy"])
def test_the_scenarios_are_listed_with_and_without_a_policy(
    cli: Cli, policy: tuple[str, ...]
) -> None:
    said = cli("judge", *policy, "--scenario", "list")
    assert said.status == 0, said.err
    told = dict(line.split(": ", maxsplit=1) for line in said.out.splitlines())
    assert list(told) == list(scenarios())
    assert len(set(told.values())) == len(told), "two scenarios that look alike"


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("nope", "no policy 'nope'"),
        ("no.py", "no policy 'no.py': No such file"),
        ("fcfs --scenario conv-tigt", "did you mean conv-tight"),
        ("fcfs --against goodputt", "did you mean goodput"),
        ("fcfs --trace azure_conv", "make up such requests themselves"),
        ("fcfs --out verdict.txt", "must end in .json or .csv"),
        ("fcfs --time-limit -5", "-5"),
    ],
)
def test_mistakes(cli: Cli, mistake: str, complaint: str) -> None:
    said = cli("judge", *mistake.split())
    assert said.status != 0
    assert complaint in " ".join(said.err.split())
