"""The study of routers: its tables, and that every question can be played."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.fleet import agents, scaling
from experiments.fleet.questions import QUESTIONS, TRACES, Question
from experiments.fleet.tables import interval, tables
from slosched.fleet.spec import make_router, make_scaler


def test_the_table_has_means_with_intervals_and_paired_gains() -> None:
    shares = {
        ("fcfs", "round_robin"): (0.5, 0.6),
        ("fcfs", "least_requests"): (0.6, 0.7),
        ("goodput", "round_robin"): (0.9, 1.0),
        ("goodput", "least_requests"): (0.9, 1.0),
    }
    rows = [
        ("conversations", 90.0, policy, router, window, share)
        for (policy, router), each in shares.items()
        for window, share in enumerate(each)
    ]
    columns = ["question", "rate", "policy", "router", "window", "in_time"]
    bounds = [
        ("conversations", 90.0, window, most, 200.0) for window, most in ((0, 0.98), (1, 1.0))
    ]
    ceilings = pd.DataFrame(
        bounds, columns=["question", "rate", "window", "most_in_time", "most_per_s"]
    )
    text = tables(pd.DataFrame(rows, columns=columns), ceilings)
    assert "## conversations, 90 requests/s" in text
    assert "| `round_robin` | 55.0 ± 63.5 % | 95.0 ± 63.5 % |" in text
    assert (
        "`least_requests` over round robin, `fcfs` in the engines: +10.0 ± 0.0 points (better in 2 of 2"
        in text
    )
    assert "both behind `round_robin`: +40.0 ± 0.0 points" in text
    assert "| any (bound) | ≤ 99.0 ± 12.7 % | ≤ 99.0 ± 12.7 % |" in text
    assert "more than 200 ± 0 such requests/s" in text
    assert "(bound)" not in tables(pd.DataFrame(rows, columns=columns), ceilings[:0])


def test_the_interval_of_one_window_is_without_end() -> None:
    assert interval(np.array([0.5])) == (0.5, math.inf)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_every_question_names_a_fleet_that_can_be_made(question: Question) -> None:
    for router in question.routers:
        fleet = question.fleet(router)
        make_router(fleet.router)
        assert len(fleet.replicas) == 4


def test_the_page_of_scaling_compares_with_the_smallest_fixed_fleet_that_suffices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"4": 0.98, "5": 0.995, "predicted": 0.996}
    rows = [
        (fleet, day, shares.get(fleet, 0.9), 7200.0 if fleet == "5" else 3600.0)
        for fleet, day in product(scaling.FLEETS, scaling.DAYS)
    ]
    results = pd.DataFrame(rows, columns=["fleet", "day", "in_time", "gpu_s"])
    monkeypatch.setattr(scaling, "RESULTS", tmp_path / "scaling.csv")
    results.to_csv(scaling.RESULTS, index=False)
    text = scaling.page()
    assert "| fleet | in time | GPU hours | of those of 5 replicas |" in text
    assert "| 5 replicas | 99.5 ± 0.0 % | 2.0 ± 0.0 | 100 ± 0 % |" in text
    assert "| `predicted` | 99.6 ± 0.0 % | 1.0 ± 0.0 | 50 ± 0 % |" in text


def test_the_committed_page_of_scaling_is_that_of_the_committed_results() -> None:
    assert scaling.PAGE.read_text(encoding="utf-8") == scaling.page()
    results = pd.read_csv(scaling.RESULTS, dtype={"fleet": str})
    played = set(zip(results["fleet"], results["day"], strict=True))
    assert played == set(product(scaling.FLEETS, scaling.DAYS))


@pytest.mark.parametrize("name", scaling.FLEETS)
def test_every_fleet_of_scaling_can_be_made(name: str) -> None:
    fleet = scaling.fleet_of(name)
    if fleet.scaling is None:
        assert len(fleet.replicas) == int(name)
    else:
        make_scaler(fleet.scaling.scaler)


@pytest.mark.skipif(not TRACES.exists(), reason="the public traces are not here")
def test_a_day_is_quiet_at_its_ends_and_busy_in_its_middle() -> None:
    arrivals_s = scaling.traffic(0).arrivals_s
    counts, _ = np.histogram(arrivals_s, bins=24, range=(0, scaling.DAY_S))
    rates = counts / (scaling.DAY_S / 24)
    assert rates.mean() == pytest.approx(scaling.RATE, rel=0.02)
    assert max(rates[0], rates[-1]) < 4.2, "3.6 requests/s at the trough"
    assert rates[10:14].mean() == pytest.approx(14.3, rel=0.05)


def test_the_committed_page_of_agents_is_that_of_the_committed_results() -> None:
    assert agents.PAGE.read_text(encoding="utf-8") == agents.page()
    results = pd.read_csv(agents.RESULTS)
    played = set(results[["rate", "planner", "router", "seed"]].itertuples(index=False, name=None))
    assert played == set(product(agents.RATES, agents.PLANNERS, agents.ROUTERS, agents.SEEDS))
