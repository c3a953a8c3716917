"""Chances to be in time, computed by hand; at first the device does a second's work in a second."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slosched.policy.kit.quotes.chance import Arrivals, Outlook, Prospects, Queued
from slosched.policy.kit.quotes.speed import FadingMean

WATCHED_S = 4.0
"""The weight of all seconds past, in the first of which nobody came."""


def test_alone_a_prompt_is_surely_in_time_or_surely_late() -> None:
    outlook = Prospects().outlook(0.1, 4, 0.0, is_overtaken=False)
    assert outlook.expected_s == pytest.approx(0.1)
    assert outlook.chance(0.11) > 0.99
    assert outlook.chance(0.1) == pytest.approx(0.5)
    assert outlook.chance(0.09) < 0.01
    assert (outlook.chance(0.0), outlook.chance(math.inf)) == (0, 1)
    assert outlook.chance(1e-300) == 0, "its square is 0 as a float"
    assert outlook.chance(1e300) == 1, "its square is no float"


def test_shorter_prompts_that_keep_coming_go_first_and_longer_ones_do_not() -> None:
    prospects = Prospects()
    for work_s, num_tokens in ((0.1, 10), (0.2, 20), (0.4, 40)):
        prospects.let_in(0.0, work_s, num_tokens, 1.0)
    outlook = prospects.outlook(0.3, 30, 0.0, is_overtaken=True)
    assert outlook.overtaking.share == pytest.approx(0.3 / WATCHED_S)
    assert outlook.overtaking.variance == pytest.approx(0.05 / WATCHED_S)
    assert outlook.expected_s == pytest.approx(0.3 / (1 - 0.3 / WATCHED_S))
    assert outlook.chance(outlook.expected_s) == pytest.approx(0.5)


def test_the_chance_is_that_of_a_normal_distribution() -> None:
    """Within a second 0.1 s come on average, with a variance of 1.5 times 0.01 s² and 2 % noise."""
    prospects = Prospects()
    prospects.let_in(0.0, 0.1 * WATCHED_S, 40, 1.0)
    outlook = prospects.outlook(0.8, 50, 0.0, is_overtaken=True)
    deviation_s = math.sqrt(1.5 * 0.01 * WATCHED_S + 0.02**2)
    assert outlook.chance(1.0) == pytest.approx(0.5 * math.erfc(-0.1 / deviation_s / math.sqrt(2)))


def test_two_that_come_at_once_are_not_taken_for_a_stream() -> None:
    """Their 2 s of prefills are a half of the latest 4 s, not all of the time to come."""
    prospects = Prospects()
    for _ in range(2):
        prospects.let_in(100.0, 1.0, 100, 1.0)
    outlook = prospects.outlook(3.1, 110, 100.0, is_overtaken=True)
    assert outlook.expected_s == pytest.approx(3.1 / 0.5)


def test_arrivals_are_forgotten() -> None:
    prospects = Prospects()
    prospects.let_in(0.0, 0.1, 10, 1.0)
    soon = prospects.outlook(0.2, 20, 0.0, is_overtaken=True)
    late = prospects.outlook(0.2, 20, 40.0, is_overtaken=True)
    assert late.overtaking.share < 1e-4 * soon.overtaking.share


def test_after_the_clock_was_set_back_no_arrival_counts_for_more_than_one() -> None:
    prospects = Prospects()
    prospects.let_in(300.0, 0.1, 10, 1.0)
    then = prospects.outlook(0.2, 20, 300.0, is_overtaken=True)
    before = prospects.outlook(0.2, 20, 10.0, is_overtaken=True)
    assert before.overtaking.share == pytest.approx(then.overtaking.share)


def test_a_clock_that_was_set_back_takes_nothing_from_a_mean() -> None:
    mean = FadingMean(1.0, first_s=2.0, memory_s=4.0)
    mean.add(0.0, -4.0)
    assert mean.value == 1.0


def test_of_many_arrivals_the_latest_count() -> None:
    """A thousand come in ten seconds, 0.005 s each; the latest half of them are kept."""
    prospects = Prospects()
    for i in range(1000):
        prospects.let_in(i / 100, 0.005, 5, 1.0)
    share = prospects.outlook(0.1, 100, 10.0, is_overtaken=True).overtaking.share
    assert share == pytest.approx(0.5, rel=0.02)


def test_the_speed_is_that_of_full_steps_and_comes_back_while_there_are_none() -> None:
    prospects = Prospects()
    for i in range(400):
        prospects.observe_full_step(0.025, 0.05, 0.05 * (i + 1), has_reserve=False)

    def expected_s(unseen_s: float) -> float:
        return prospects.outlook(0.1, 100, 20.0 + unseen_s, is_overtaken=False).expected_s

    assert expected_s(0.0) == pytest.approx(0.2, rel=0.01)
    assert expected_s(30.0) == pytest.approx(0.1 / (1 - 0.5 / math.e), rel=0.01)
    assert expected_s(600.0) == pytest.approx(0.1, rel=0.01)


def test_a_step_with_a_reserve_shows_how_fast_the_device_is_at_least() -> None:
    """Half of it is used in steps with a reserve.  The model says that it does twice as much."""

    def speed(*, has_reserve: bool, is_overloaded: bool) -> float:
        prospects = Prospects()
        for i in range(400):
            prospects.observe_full_step(0.025, 0.05, 0.05 * (i + 1), has_reserve=has_reserve)
            prospects.backlog.note_step(0.05, 0.05, is_full=is_overloaded)
        return prospects.outlook(0.0, 1, 20.0, is_overtaken=False).speed

    assert speed(has_reserve=True, is_overloaded=False) == pytest.approx(1.0)
    assert speed(has_reserve=True, is_overloaded=True) == pytest.approx(0.5, rel=0.01)
    assert speed(has_reserve=False, is_overloaded=False) == pytest.approx(0.5, rel=0.01)


def test_the_hardest_of_several_times_decides() -> None:
    """By its own TTFT 0.5 s are needed; others make 0.95 s until a second, and 1 s until 3 s."""
    prospects = Prospects()
    needed_s, until_s = np.array([0.5, 0.95, 1.0]), np.array([0.7, 1.0, 3.0])
    outlook, at = prospects.hardest(needed_s, until_s, 30, 0.0, 0.0)
    assert (at, outlook.needed_s) == (1, 0.95)
    outlook, at = prospects.hardest(needed_s[[0, 2]], until_s[[0, 2]], 30, 0.0, 0.0)
    assert (at, outlook.needed_s) == (0, 0.5)


def test_who_is_due_before_the_step_ends_is_late_whatever_others_need() -> None:
    needed_s, until_s = np.array([0.1, 0.5, 0.9]), np.array([0.2, 0.3, 0.4])
    outlook, at = Prospects().hardest(needed_s, until_s, 30, 0.0, wait_s=1.0)
    assert (at, outlook.needed_s) == (0, 0.1)
    assert outlook.chance(0.2 - 1.0) == 0


def test_shorter_prompts_to_come_count_if_they_are_due_by_then() -> None:
    """In 4 s two come, one due after a second and one after 3 s, each of 0.4 s."""
    prospects = Prospects()
    prospects.let_in(0.0, 0.4, 10, 1.0)
    prospects.let_in(0.0, 0.4, 10, 3.0)
    prospects.let_in(0.0, 0.4, 90, 1.0)
    needed_s, until_s = np.array([0.5]), np.array([2.0])
    alone, _ = prospects.hardest(needed_s, until_s, 30, 0.0, 0.0)
    assert alone.overtaking.share == pytest.approx(0.4 / WATCHED_S)
    until_later_s = np.array([2.0, 3.0])
    outlook, at = prospects.hardest(np.array([0.5, 2.7]), until_later_s, 30, 0.0, 0.0)
    assert at == 1
    assert outlook.needed_s == pytest.approx(2.7 + 2.0 * 0.8 / WATCHED_S)


def test_a_device_that_stood_still_for_an_hour_is_slow_and_no_division_by_zero() -> None:
    """Its step did no prefill.  A request that was sent meanwhile is judged afterwards."""
    prospects = Prospects()
    prospects.observe_full_step(0.0, 3600.0, 3600.0, has_reserve=False)
    outlook = prospects.outlook(2.0, 100, 3599.0, is_overtaken=True)
    assert outlook.expected_s > 1e6
    assert outlook.chance(10.0) < 1e-6


def test_what_overtakes_several_is_what_overtakes_each() -> None:
    arrivals = Arrivals()
    assert arrivals.shorter_than_each([10], 0.0) == [arrivals.shorter_than(10, 0.0)]
    for i in range(700):
        arrivals.add(i / 50, 0.01 + 0.07 * (i % 13), 1 + 7 * (i % 13), 1.0)
    lengths_tokens = [1, 5, 40, 200]
    each = [arrivals.shorter_than(num_tokens, 15.0) for num_tokens in lengths_tokens]
    for found, alone in zip(arrivals.shorter_than_each(lengths_tokens, 15.0), each, strict=True):
        assert found == pytest.approx(alone)


def test_chances_are_lost_where_more_goes_first_and_time_is_short() -> None:
    """One has 0.1 s to spare, one half a second, and one has lost already; nobody overtakes."""
    tight, ample, lost = (Queued(0.4, 10, left_s) for left_s in (0.5, 0.9, 0.3))
    prospects = Prospects()
    assert prospects.chance_lost([tight, ample, lost], 0.2, 0.0) == pytest.approx(1.0)
    assert prospects.chance_lost([tight, ample, lost], 0.05, 0.0) == pytest.approx(0.0, abs=1e-3)
    assert prospects.chance_lost([], 0.2, 0.0) == 0.0


def test_what_is_lost_is_the_difference_of_two_chances() -> None:
    prospects = Prospects()
    prospects.let_in(0.0, 0.1, 10, 1.0)
    queued = Queued(needed_s=0.3, num_tokens=20, left_s=0.5)
    outlook = prospects.outlook(0.3, 20, 0.0, is_overtaken=True)
    later = Outlook(0.4, outlook.speed, outlook.overtaking)
    lost = outlook.chance(0.5) - later.chance(0.5)
    assert 0.01 < lost < 0.99
    assert prospects.chance_lost([queued], 0.1, 0.0) == pytest.approx(lost)
