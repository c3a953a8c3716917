"""Steps longer than a TPOT in which decodes give way, with times added up by hand."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

import pytest
from views import R, flat_model, view_of

from slosched.core import DeadlineRule, Limits, SchedulerView
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.while_ahead import limit_while_ahead_s

LIMITS = Limits(max_num_batched_tokens=1000, max_num_seqs=100)
MARGIN = 0.05


def view(*requests: R, limits: Limits = LIMITS, constant_s: float = 20e-3) -> SchedulerView:
    """20 ms + 50 us a token: 12 tokens a millisecond in 50 ms, 14.3 in the 70 ms of 1,000."""
    return view_of(requests, flat_model(constant_s, 50e-6), limits=limits)


def limit_of(seen: SchedulerView, limit_s: float = 0.05) -> float:
    decodes = sorted(seen.running, key=attrgetter("deadline_s"))
    pace = Pace.of(decodes, seen.model, seen.now_s)
    return limit_while_ahead_s(pace, decodes, seen, MARGIN, limit_s)


def test_the_step_ends_a_tenth_and_the_margin_before_the_first_decode_is_due() -> None:
    ahead = [R("a", 11, 0.5, out=1), R("b", 11, 0.3, out=1)]
    assert limit_of(view(*ahead)) == pytest.approx(0.9 * 0.3 - MARGIN * 0.05)


def test_decodes_that_are_no_further_ahead_leave_the_limit() -> None:
    ahead = R("a", 11, 0.5, out=1)
    assert limit_of(view(ahead, R("b", 11, 0.058, out=1))) == 0.05, "0.9 * 58 - 2.5 ms = 49.7 ms"
    assert limit_of(view(ahead, R("b", 11, 0.059, out=1))) > 0.05
    assert limit_of(view(ahead, R("late", 11, -0.01, out=1))) == 0.05


def test_a_decode_whose_tpot_is_not_kept_counts_until_it_is_late() -> None:
    """5 ms leave no time for a tile, so that TPOT is not kept."""
    ahead = R("a", 11, 0.5, out=1)
    assert limit_of(view(ahead, R("hasty", 11, 0.06, tpot_s=0.005, out=1))) < 0.054
    assert limit_of(view(ahead, R("hasty", 11, 0.02, tpot_s=0.005, out=1))) == 0.05
    late = R("hasty", 11, -0.01, tpot_s=0.005, out=1)
    assert limit_of(view(ahead, late)) == pytest.approx(0.9 * 0.5 - MARGIN * 0.05)


def test_a_lost_decode_does_not_count_under_envelope() -> None:
    envelope = replace(LIMITS, deadline_rule=DeadlineRule.ENVELOPE)
    seen = view(R("a", 11, 0.5, out=1), R("late", 11, -0.01, out=1), limits=envelope)
    decodes = sorted(seen.running, key=attrgetter("deadline_s"))
    pace = Pace.of(decodes, seen.model, seen.now_s, num_lost=1)
    longer_s = limit_while_ahead_s(pace, decodes, seen, MARGIN, 0.05)
    assert longer_s == pytest.approx(0.9 * 0.5 - MARGIN * 0.05)


def test_the_limit_stays_where_full_steps_are_hardly_faster() -> None:
    """With 5 ms for a step they give 18.2 tokens a millisecond, and steps of 50 ms give 18."""
    ahead = R("a", 11, 0.5, out=1)
    assert limit_of(view(ahead, constant_s=5e-3)) == 0.05
    assert limit_of(view(ahead), limit_s=0.070) == 0.070, "as long as a full step"


def test_the_limit_stays_where_decodes_could_not_get_ahead_again() -> None:
    """A step of 601 decodes takes 50.05 ms."""
    decodes = [R(f"d{i}", 11, 0.5, out=1) for i in range(601)]
    assert limit_of(view(*decodes[:600])) > 0.05
    assert limit_of(view(*decodes)) == 0.05


def test_the_limit_stays_under_tbt() -> None:
    tbt = replace(LIMITS, deadline_rule=DeadlineRule.TBT)
    assert limit_of(view(R("a", 11, 0.5, out=1), limits=tbt)) == 0.05


def test_prompts_take_a_full_step_while_decodes_are_ahead() -> None:
    """1,600 tokens in steps of 50 ms would take 130 ms, in two full steps 120.

    In the first both prompts cannot be in time, so the decode gives way.
    """
    ahead = R("decode", 11, 2.0, out=1)
    prompts = R("a", 800, 0.13), R("b", 800, 0.121)
    tokens = Goodput().schedule(view(ahead, *prompts)).num_scheduled_tokens
    assert sum(tokens.values()) >= 960
    near = replace(ahead, due_s=0.055)
    tokens = Goodput().schedule(view(near, *prompts)).num_scheduled_tokens
    assert sum(tokens.values()) <= 600
