"""Tests of the robustness study: its disturbances, its counts, and a small study as a whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.arena.scenarios import MadeUp, Scenario
from experiments.robustness import report
from experiments.robustness.kinds import Kind, kinds, num_warm_up
from experiments.robustness.losses import Compared, loss
from experiments.robustness.results import HERE, Results, provenance
from experiments.robustness.study import Scale, Workload, WorkloadStudy
from slosched.core import SLO, DeadlineRule
from slosched.evaluate.capacity import Outcomes, Store
from slosched.evaluate.capacity.outcomes import OUTCOME
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest
from slosched.workload.lengths import Lognormal

MODEL = load_model("h100/llama-3.1-8b")
CALM = SimulationConfig(num_blocks=4096, online=True)
KINDS = kinds((8, 10))
EVERY = [pytest.param(k, v, id=f"{k.name} {v}") for k in KINDS for v in k.variants]


def make_trace(num_requests: int = 60) -> Trace:
    """Make about as many requests as the device can serve, for twelve seconds."""
    slo = SLO(0.5, 0.015)
    requests = [
        TraceRequest(f"r{i}", 0.2 * i, 2000 + 100 * (i % 37), 20 + i % 51, slo)
        for i in range(num_requests)
    ]
    return Trace.of(requests, "steady")


def play(trace: Trace, config: SimulationConfig) -> Outcomes:
    requests = simulate(trace, make_policy("goodput"), MODEL, config)
    return Outcomes.of(requests, DeadlineRule.MEAN_TPOT)


@pytest.mark.parametrize(("kind", "variant"), EVERY)
def test_a_kind_at_its_neutral_strength_disturbs_nothing_and_at_its_greatest_something(
    kind: Kind, variant: str
) -> None:
    trace = make_trace()
    calm = replace(CALM, online=variant != "as fitted")
    digests = []
    for strength in (kind.neutral, kind.strengths[-1]):
        config = kind.change(CALM, variant, strength)
        digests.append(play(kind.trace(trace, strength), config).digest)
    assert digests[0] == play(trace, calm).digest
    # The correction may leave no effect of a constant bias.
    assert len(set(digests)) > 1 or variant == "corrected online"


def test_outputs_are_shorter_before_what_counts_and_as_ever_within_it() -> None:
    (kind,) = (k for k in KINDS if k.shifts_outputs)
    trace, first = make_trace(), num_warm_up(make_trace())
    shifted = kind.trace(trace, 4.0)
    assert shifted.requests[first:] == trace.requests[first:]
    for before, after in zip(shifted.requests[:first], trace.requests[:first], strict=True):
        assert before.num_output_tokens == max(1, round(after.num_output_tokens / 4))
        assert replace(before, num_output_tokens=1) == replace(after, num_output_tokens=1)


def outcomes(*fates: str) -> Outcomes:
    """Make outcomes: good, rejected, the first token late ("first"), or other tokens late."""
    rows = np.zeros(len(fates), dtype=OUTCOME)
    for row, fate in zip(rows, fates, strict=True):
        row["finished"], row["good"] = fate != "rejected", fate == "good"
        row["ttft_s"] = 9.0 if fate == "first" else 0.1
    return Outcomes(rows)


def test_a_loss_is_of_the_same_requests_and_says_how_they_were_lost() -> None:
    trace = make_trace(12)  # eight of them count
    calm = outcomes(*(["good"] * 11 + ["first"]))
    disturbed = outcomes(
        *(["rejected"] * 4 + ["good"] * 3), "first", "later", "rejected", "good", "good"
    )
    found = loss([Compared(trace, calm, disturbed)] * 2)
    assert found.undisturbed == 7 / 8
    assert found.loss_points == pytest.approx(25)  # three lost, one won
    assert found.rejected_points == pytest.approx(12.5)
    assert found.first_late_points == pytest.approx(0)  # one more, one fewer
    assert found.tokens_late_points == pytest.approx(12.5)
    assert found.low_points < 25 < found.high_points
    same = loss([Compared(trace, disturbed, disturbed)] * 2)
    assert (same.loss_points, same.low_points, same.high_points) == (0, 0, 0)


def test_a_small_study_from_its_replays_to_its_page(tmp_path: Path) -> None:
    source = MadeUp(Lognormal(1000, 0.5), Lognormal(40, 0.5), cv=2.0)
    scenario = Scenario("small", "h100/llama-3.1-8b", source, "medium")
    scale = Scale(num_windows=2, window_requests=40, precision=0.3)
    policies = ("edf:drop=infeasible", "goodput")
    told: list[tuple[int, int]] = []
    with Store(tmp_path / "points.sqlite") as store:
        study = WorkloadStudy(
            Workload(scenario, (2, 200)), policies, scale, store, 1, ("stall", "bias")
        )
        rates = study.rates(lambda *_: None)
        losses = study.losses(rates, lambda *done: told.append(done))
        assert told[-1][0] == told[-1][1] > 0
        again = WorkloadStudy(
            Workload(scenario, (2, 200)), policies, scale, store, 1, ("stall", "bias")
        )
        told.clear()
        pd.testing.assert_frame_equal(again.losses(rates, lambda *done: told.append(done)), losses)
        assert told == []  # all of it was in the store
    assert list(rates["policy"]) == list(policies)
    assert len(losses) == len(policies) * (4 + 4 + 3)
    assert (losses["low_points"] <= losses["loss_points"]).all()
    ways = losses[["rejected_points", "first_late_points", "tokens_late_points"]].sum(axis=1)
    assert ways.to_numpy() == pytest.approx(losses["loss_points"].to_numpy())
    stalls = losses[losses["kind"] == "stall"]
    assert all(
        one.sort_values("strength")["loss_points"].iloc[-1] >= 0
        for _, one in stalls.groupby("policy")
    )
    told: list[tuple[int, int]] = []
    lasting = study.lasting(rates, lambda done, total: told.append((done, total)))
    num_bounds = len(lasting) * 2  # of two windows
    assert told == [(done, num_bounds) for done in range(num_bounds + 1)]
    assert lasting["share"].between(lasting["least_share"], lasting["most_share"]).all()
    assert (
        1 >= lasting["share"].iloc[0] > lasting["share"].iloc[1] > 0
    )  # of half of the cache, 1/200
    Results(rates, losses, lasting, provenance(2, 40, 0.1)).write(tmp_path / "results")
    results = Results.read(tmp_path / "results")
    report.write(results, tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert page == report.text(results)
    assert {path.stem for path in (tmp_path / "page").iterdir()} == {"stall", "bias"}
    assert page.count("**small") == 3  # a finding for each variant


def finding(**losses: tuple[float, float, float]) -> str:
    """Return the page's finding on policies with these losses and intervals, by stalls."""
    (kind,) = (k for k in KINDS if k.name == "stall")
    names = ("loss_points", "low_points", "high_points")
    rows = [
        {
            "workload": "w",
            "policy": f"{policy}:a=1",
            "kind": "stall",
            "variant": "",
            "strength": 0.2,
            "undisturbed": 0.99,
            "rejected_points": 0.1,
            "first_late_points": 0.7,
            "tokens_late_points": 0.2,
            **dict(zip(names, found, strict=True)),
        }
        for policy, found in losses.items()
    ]
    text = report._section(kind, pd.DataFrame(rows), "")
    return next(line for line in text.splitlines() if line.startswith("- "))


def test_a_finding_tells_who_surely_breaks_who_surely_does_not_and_how() -> None:
    told = finding(a=(1.5, 1.1, 2.0), b=(9.0, 0.9, 12.0), c=(0.2, 0.0, 0.6), d=(4.0, 3.0, 5.0))
    assert told == (
        "- **w**: d loses 4.0 (3.0 to 5.0) at 200 ms, mostly because first tokens are late; "
        "a loses 1.5 (1.1 to 2.0) at 200 ms, mostly because first tokens are late. "
        "These surely lose less than 1 point: c."
    )
    told = finding(a=(0.5, 0.0, 1.0))
    assert told == "- **w**: no policy surely loses more than 1 point."


def test_the_page_is_made_of_the_results() -> None:
    if not (HERE / "losses.csv").exists():
        pytest.skip("the study has not been run yet: make robustness")
    assert report.PAGE.read_text(encoding="utf-8") == report.text(Results.read())
    names = {path.stem for path in report.FIGURES.glob("*.svg")}
    assert names == {kind.name for kind in KINDS}


def test_strengths_go_up() -> None:
    """Check an order on which figures and findings rely."""
    assert all(a < b for kind in KINDS for a, b in pairwise(kind.strengths))
