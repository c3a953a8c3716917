"""A policy that declines to plan beside a group is asked less and less often."""

from __future__ import annotations

from slosched.scheduler.declines import Declines


def num_skipped(declines: Declines) -> int:
    """Return the steps that are skipped until the next question."""
    num = 0
    while declines.skips_step():
        num += 1
    return num


def test_each_time_about_twice_as_many_steps_are_skipped_up_to_32() -> None:
    declines, skipped = Declines(), list[int]()
    for _ in range(8):
        skipped.append(num_skipped(declines))
        declines.note_declined()
    assert skipped == [0, 1, 3, 7, 15, 31, 32, 32]


def test_after_a_plan_it_begins_anew() -> None:
    declines = Declines()
    for _ in range(3):
        declines.note_declined()
    assert num_skipped(declines) == 7
    declines.note_planned()
    assert num_skipped(declines) == 0
    declines.note_declined()
    assert num_skipped(declines) == 1
    declines.skip_one()
    assert num_skipped(declines) == 1
