"""Tests of `python -m experiments.long_steps`: its results, its page, and the policy without."""

from __future__ import annotations

import pytest

from experiments.arena.scenarios import TRACES
from experiments.long_steps import report
from experiments.long_steps.cells import CELLS, POLICIES
from experiments.portfolio.cells import CONVERSATIONS, REPORT, Cell, Part
from experiments.portfolio.play import played

needs_traces = pytest.mark.skipif(
    not (TRACES / CONVERSATIONS).exists(), reason=f"the public traces are not in {TRACES}"
)


def test_the_page_is_made_of_the_results() -> None:
    committed = report.PAGE.read_text()
    assert report.text() == committed
    assert all(cell in committed for cell in CELLS)


@needs_traces
def test_without_long_steps_a_mixture_of_experts_serves_fewer_in_time() -> None:
    parts = (Part(CONVERSATIONS, 24.0, "tight", 80),)
    play = Cell("short", "b200/gpt-oss-120b", parts).play(REPORT, 0)
    shares = {}
    for name in ("goodput", "without"):
        blocks = str(played(play, POLICIES[name])["blocks"]).split()
        shares[name] = sum(map(float, blocks))
    assert shares["goodput"] > shares["without"]
