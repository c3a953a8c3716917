"""`slosched judge` on a policy in a file, against requests of a small trace."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import Said

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
        assert {row["verdict"] for row in csv.DictReader(file)} == {"level"}


def test_a_broken_policy_is_told_which_law_it_broke(cli: Cli) -> None:
    Path("lottery.py").write_text(LOTTERY, encoding="utf-8")
    said = cli("judge", "lottery.py", "--quick")
    assert said.status == 1
    assert "lottery.py breaks a law of policies: the same seed gave other decisions" in said.err


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
