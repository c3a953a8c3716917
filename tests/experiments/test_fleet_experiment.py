"""The study of routers: its tables, and that every question can be played."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from experiments.fleet.questions import QUESTIONS, Question
from experiments.fleet.tables import interval, tables
from slosched.fleet.spec import make_router


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
    text = tables(pd.DataFrame(rows, columns=columns))
    assert "## conversations, 90 requests/s" in text
    assert "| `round_robin` | 55.0 ± 63.5 % | 95.0 ± 63.5 % |" in text
    assert (
        "`least_requests` over round robin, `fcfs` in the engines: +10.0 ± 0.0 points (better in 2 of 2"
        in text
    )
    assert "both behind `round_robin`: +40.0 ± 0.0 points" in text


def test_the_interval_of_one_window_is_without_end() -> None:
    assert interval(np.array([0.5])) == (0.5, math.inf)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_every_question_names_a_fleet_that_can_be_made(question: Question) -> None:
    for router in question.routers:
        fleet = question.fleet(router)
        make_router(fleet.router)
        assert len(fleet.replicas) == 4
