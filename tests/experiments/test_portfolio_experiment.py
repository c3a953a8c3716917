"""Tests of `python -m experiments.portfolio` on a few requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.arena.scenarios import TRACES
from experiments.paired import against
from experiments.portfolio import report
from experiments.portfolio.cells import CELLS, CODE, CONVERSATIONS, DESIGN, H100, Cell, Part
from experiments.portfolio.play import played

needs_traces = pytest.mark.skipif(
    not (TRACES / CONVERSATIONS).exists(), reason=f"the public traces are not in {TRACES}"
)


@needs_traces
def test_parts_follow_one_another_and_what_arrives_after_the_turn_is_judged() -> None:
    parts = (Part(CONVERSATIONS, 10.0, "medium", 20), Part(CODE, 2.0, "medium", 10))
    play = Cell("turns", H100, parts).play(DESIGN, 0)
    assert len(play.trace) == 30
    assert play.trace.requests[20].arrival_s == play.trace.requests[19].arrival_s
    assert play.judged_from_s == pytest.approx(play.trace.requests[19].arrival_s + 20)


@needs_traces
def test_one_request_in_so_many_is_promised_what_cannot_be_kept() -> None:
    part = Part(CONVERSATIONS, 10.0, "medium", 40)
    trace = Cell("poison", H100, (part,), poison=10).play(DESIGN, 0).trace
    assert sum(request.slo.tpot_s == 0.005 for request in trace.requests) == 4


@needs_traces
def test_a_replay_has_a_share_for_each_block_and_its_cost() -> None:
    part = Part(CONVERSATIONS, 10.0, "medium", 40)
    play = Cell("few", H100, (part,)).play(DESIGN, 0)
    row = played(play, "portfolio|goodput|edf")
    shares = [float(share) for share in str(row["blocks"]).split()]
    assert shares == [1.0] * 8
    assert row["num_evaluations"] == 0
    assert played(replace(play, judged_from_s=0.0), "fcfs")["num_judged"] == 40


def test_the_interval_of_a_difference_is_students() -> None:
    assert against(np.array([0.0, 2.0])) == "+1.0 [-11.7, +13.7]"


def test_every_cell_has_results_or_is_left_out_of_the_page() -> None:
    names = set(report.read()["cell"])
    assert names
    assert names <= set(CELLS)
