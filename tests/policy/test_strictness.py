"""The least chance that lets a request in follows what became of those that were let in."""

from __future__ import annotations

import pytest
from factories import make_request

from slosched.core import NO_SLO, Request, RequestStatus
from slosched.policy.kit.strictness import Strictness


def let_in(strictness: Strictness, *, first_s: float | None = None, name: str = "r") -> Request:
    """Let a request in that has a second for its first token, and say when that comes."""
    request = make_request(name, ttft_s=1.0)
    strictness.let_in(request)
    if first_s is not None:
        request.token_times_s.append(first_s)
        request.num_output_tokens = 1
    return request


def test_it_begins_high_and_comes_down_while_requests_are_in_time() -> None:
    strictness = Strictness(least=0.2, most_late=0.02)
    assert strictness.least_chance == 0.5
    for i in range(1000):
        let_in(strictness, first_s=0.9, name=f"r{i}")
    strictness.look()
    assert strictness.least_chance == 0.2


@pytest.mark.parametrize("end", ["late", "rejected"])
def test_one_that_is_late_outweighs_fifty_that_are_in_time(end: str) -> None:
    strictness = Strictness(least=0.2, most_late=0.02)
    for i in range(100):
        let_in(strictness, first_s=0.9, name=f"r{i}")
    strictness.look()
    before = strictness.least_chance
    assert before < 0.5
    for i in range(49):
        let_in(strictness, first_s=0.9, name=f"again {i}")
    if end == "late":
        let_in(strictness, first_s=1.1)
    else:
        let_in(strictness).status = RequestStatus.REJECTED
    strictness.look()
    assert strictness.least_chance == pytest.approx(before)


def test_nothing_is_learnt_from_best_effort_those_that_left_and_forecasts() -> None:
    strictness = Strictness(least=0.2, most_late=0.02)
    eased = let_in(strictness, name="eased", first_s=9.0)
    eased.asked_slo, eased.slo = eased.slo, NO_SLO
    let_in(strictness, name="left").status = RequestStatus.ABORTED
    let_in(strictness, name="running", first_s=0.1).num_output_placeholders = 1
    strictness.look()
    assert strictness.least_chance == 0.5


def test_it_stays_where_late_requests_do_not_matter() -> None:
    strictness = Strictness(least=0.2, most_late=1.0)
    let_in(strictness, first_s=9.0)
    strictness.look()
    assert strictness.least_chance == 0.2
