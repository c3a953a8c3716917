"""Which requests have arrived, and what the latest of them ask for."""

from __future__ import annotations

import pytest
from views import R

from slosched.core import Request
from slosched.policy.kit.arrivals import Arrivals


def test_who_was_sent_earlier_but_is_queued_later_has_arrived_too() -> None:
    """A server has read a long prompt when a short one that came later already waits.  And where
    the clock was set back, all that arrive seem to have come earlier."""
    arrivals = Arrivals()
    short, long, last = [
        Request(name, at_s, 100, 9) for name, at_s in zip("abc", (3, 2, 1), strict=True)
    ]
    assert arrivals.see([short]) == [short]
    assert arrivals.see([short, long]) == [long]
    assert arrivals.see([long, last]) == [last]
    assert arrivals.see([long, last]) == []


def test_all_of_a_burst_have_arrived_though_the_latest_tell_what_comes() -> None:
    arrivals, burst = Arrivals(), [Request(f"r{i}", i / 100, 400, 9) for i in range(100)]
    assert len(arrivals.see(burst)) == 100
    assert arrivals.see(burst[:20]) == []


@pytest.mark.parametrize(("num_others", "are_alike"), [(0, True), (4, True), (5, False)])
def test_promises_are_alike_if_three_quarters_ask_for_the_same_tpot(
    num_others: int, are_alike: bool
) -> None:
    tpots_s = [0.1] * 12 + [0.05] * num_others
    arrivals = Arrivals()
    arrivals.see(
        [R(f"seen {i}", 11, 1.0, tpot_s=tpot_s).request() for i, tpot_s in enumerate(tpots_s)]
    )
    assert arrivals.are_promises_alike == are_alike
