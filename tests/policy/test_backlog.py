"""Whether prompts have waited without a break lately."""

from __future__ import annotations

from slosched.policy.kit.quotes.backlog import Backlog


def pressure_after(*steps: tuple[float, float, bool]) -> float:
    """Return the pressure after steps that took so long, were to take so long, and were full."""
    backlog = Backlog()
    for took_s, predicted_s, is_full in steps:
        backlog.note_step(took_s, predicted_s, is_full=is_full)
    return backlog.pressure


def test_it_is_one_while_every_step_leaves_prompts_over() -> None:
    assert pressure_after(*[(0.05, 0.05, True)] * 400) == 1.0


def test_a_lull_takes_it_away_and_it_comes_back_in_a_lasting_overload() -> None:
    lull = [(0.05, 0.05, False)] * 100
    assert pressure_after(*lull) == 0.0
    assert pressure_after(*lull, *[(0.05, 0.05, True)] * 20) == 0.0
    assert 0.0 < pressure_after(*lull, *[(0.05, 0.05, True)] * 160) < 1.0


def test_a_single_long_lull_counts_no_more_than_all_that_was_before() -> None:
    full = [(0.05, 0.05, True)] * 160
    assert pressure_after((1e6, 0.05, False), *full) > 0.0


def test_time_beyond_that_of_a_full_step_was_idle() -> None:
    assert pressure_after(*[(1.0, 0.05, True)] * 20) == 0.0


def test_a_step_that_took_no_time_says_nothing() -> None:
    assert pressure_after((0.0, 0.05, False)) == 1.0
