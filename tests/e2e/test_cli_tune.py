"""`slosched tune`, and `capacity` with the tuned policy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from command_line import Said

pytestmark = pytest.mark.e2e

Cli = Callable[..., Said]
WORKLOAD = [
    *("--trace", "poisson", "-n", "60", "--seeds", "2", "--max-output-tokens", "8"),
    *("--target", "0.9", "--precision", "0.2", "--jobs", "1"),
]


@pytest.mark.slow
def test_what_is_tuned_can_be_compared(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "tune"
    policy = ("--policy", "sarathi:token_budget=32", "--grid", "token_budget=64,1024")
    said = cli("tune", *policy, *WORKLOAD, "-o", str(out))
    assert said.status == 0, said.err
    assert "on requests that it was not tuned on" in said.out
    assert "Promised: TTFT" in said.out
    assert "half of each replay is warm-up" in said.out, "why the table has a star"
    assert json.loads((out / "tuned.json").read_text())["policy"] == "sarathi:token_budget=1024"
    said = cli(
        *("capacity", "-p", "sarathi", "--tuned", str(out / "tuned.json"), *WORKLOAD),
        *("--no-bound", "-o", str(tmp_path / "capacity")),
    )
    assert said.status == 0, said.err
    assert "tuned: sarathi:token_budget=32 -> sarathi:token_budget=1024" in " ".join(
        said.out.split()
    )
    found = pd.read_csv(tmp_path / "capacity" / "capacities.csv")
    assert list(found.policy) == ["sarathi", "sarathi:token_budget=1024 (tuned)"]
    assert "best of 3" in (tmp_path / "capacity" / "report.html").read_text()
    said = cli(
        *("compare", "-p", "sarathi", "--tuned", str(out / "tuned.json"), "--trace", "poisson"),
        *("-n", "40", "-o", str(tmp_path / "compare")),
    )
    assert said.status == 0, said.err
    assert "tuned: sarathi:token_budget=32 -> sarathi:token_budget=1024" in " ".join(
        said.out.split()
    )
    report = (tmp_path / "compare" / "report.html").read_text()
    assert "sarathi:token_budget=1024 (tuned)" in report
    assert "best of 3" in report


@pytest.mark.parametrize(
    ("mistake", "complaint"),
    [
        ("tune --grid token_budget", ("--grid 'token_budget'", "NAME=VALUE")),
        ("tune --grid tokens=1", ("tokens", "token_budget", "max_num_seqs")),
        ("tune --grid token_budget=x", ("token_budget", "'x'")),
        ("tune --at-rate 0 --grid token_budget=64", ("rate", "0.0")),
        ("capacity --tuned missing.json", ("missing.json",)),
    ],
)
def test_a_mistake_is_named(cli: Cli, mistake: str, complaint: tuple[str, ...]) -> None:
    said = cli(*mistake.split(), *WORKLOAD)
    assert said.status == 1
    for words in complaint:
        assert words in said.complaint, said.complaint
