"""Tests of `python -m experiments.overlap` on a few requests."""

from __future__ import annotations

from itertools import product

import pytest

from experiments.overlap.__main__ import POLICIES, SCHEDULE_S, TRACE, set_up, table


def test_overlap_gives_back_what_slow_decisions_cost() -> None:
    if not TRACE.exists():
        pytest.skip(f"the public trace is not at {TRACE}")
    setup = set_up(rate=20.0, num_requests=120, seed=1)
    slow = setup.attainment("sarathi", 0.016, overlap=False)
    hidden = setup.attainment("sarathi", 0.016, overlap=True)
    free = setup.attainment("sarathi", 0.0, overlap=False)
    assert slow < hidden - 0.2
    assert hidden <= free


def test_the_table_has_a_row_a_policy_and_way() -> None:
    attained = dict.fromkeys(product(POLICIES, SCHEDULE_S, (False, True)), 0.987)
    lines = table(attained)
    assert lines[0] == "| policy | steps | 0 ms | 1 ms | 5 ms |"
    assert lines[2] == "| `sarathi` | one by one | 98.7% | 98.7% | 98.7% |"
    assert len(lines) == 2 + 2 * len(POLICIES)
