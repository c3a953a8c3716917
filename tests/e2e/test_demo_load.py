"""The policies that the demo compares, its load, and its commands; all of it takes minutes."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import SLOSCHED

from slosched.cli.demo.load import choose_load
from slosched.cli.demo.server import running_server
from slosched.cli.demo.setup import BASELINE, LABELS, OVERLOAD, REPLICA, RULE, SPECS, Files
from slosched.core import SLO, EndReason, Request
from slosched.metrics import RequestRecord, summarize
from slosched.perfmodel import load_model, save_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate
from slosched.workload import Trace, synthesize

MODEL = load_model("cpu/smollm2-135m")


def played(spec: str, rate: float, slo: SLO) -> list[Request]:
    trace = synthesize("azure_conv", num_requests=60, rate=1.0, seed=0).with_lengths_scaled(0.125)
    offered: Trace = trace.scaled_to(rate).with_slo(slo)
    return simulate(offered, make_policy(spec), MODEL, REPLICA)


def attainment(requests: list[Request]) -> float:
    return summarize([RequestRecord.from_request(r) for r in requests], RULE).attainment


def test_the_load_is_beyond_what_the_baseline_serves_well() -> None:
    load = choose_load(MODEL, 60, seed=0)
    assert load.rate == OVERLOAD * load.capacity
    assert attainment(played(SPECS[BASELINE], 0.7 * load.capacity, load.slo)) >= 0.9
    assert attainment(played(SPECS[BASELINE], load.rate, load.slo)) < 0.9
    assert choose_load(MODEL, 60, seed=0) == load


@pytest.mark.parametrize("name", SPECS)
def test_a_label_says_whether_the_policy_drops_requests(name: str) -> None:
    load = choose_load(MODEL, 60, seed=0)
    requests = played(SPECS[name], 20 * load.rate, load.slo)
    dropped = {r.end_reason for r in requests} - {EndReason.STOP, EndReason.LENGTH}
    assert LABELS[name] == f"{name}, {'with' if dropped else 'without'} dropping"


@pytest.mark.e2e
def test_names_with_blanks_stay_whole(tmp_path: Path) -> None:
    files = Files(tmp_path / "my runs")
    words = (SLOSCHED, "demo", "-m", "./no model", "-o", str(files.folder))
    said = subprocess.run(words, capture_output=True, text=True, check=False).stderr
    assert "no such model directory: './no model'" in said
    save_model(replace(MODEL, provenance={}), files.model)
    with running_server(BASELINE, files.model, "tiny-random", 1, files) as url:
        assert url.startswith("http://")
