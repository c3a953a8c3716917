"""Answers to one prompt at once: T = 5 ms + 0.05 ms a token, for decodes as for prompts."""

from __future__ import annotations

import pytest
from views import FLAT, R, decode

from slosched.core import Request, fan_out
from slosched.policy.kit.crowd import Crowd, num_answers


def asked(num: int, tpot_s: float = 0.05, name: str = "odd") -> Request:
    request = R(name, 100, due_s=1.0, tpot_s=tpot_s, max_tokens=50).request()
    fan_out(request, num)
    assert num_answers(request) == num
    return request


def too_long_s(
    request: Request, running: list[Request] | None = None, awaited: list[Request] | None = None
) -> float | None:
    crowd = Crowd()
    crowd.note(running or [])
    return crowd.too_long_s(request, FLAT, awaited or [])


def test_a_single_answer_is_never_too_many() -> None:
    running = [decode(f"r{i}", 100, slack_ms=50) for i in range(2000)]
    assert too_long_s(asked(1), running) is None


def test_answers_may_take_three_quarters_of_the_time_with_the_decodes_that_run() -> None:
    """Of 50 ms, 37.5 ms are 5.05 for a step and one answer, and 0.05 for each of 649 others."""
    assert too_long_s(asked(649)) is None
    assert too_long_s(asked(651)) == pytest.approx(0.005 + 0.05e-3 * 651)
    running = [decode(f"r{i}", 100, slack_ms=50) for i in range(400)]
    assert too_long_s(asked(249), running) is None
    assert too_long_s(asked(251), running) is not None


def test_answers_of_one_token_are_no_decodes() -> None:
    request = asked(651)
    request.max_tokens = 1
    assert too_long_s(request) is None


def test_several_answers_that_are_awaited_count_like_those_that_run() -> None:
    assert too_long_s(asked(251), awaited=[asked(400, name="before")]) is not None
    assert too_long_s(asked(251), awaited=[asked(1, name=f"b{i}") for i in range(900)]) is None


def test_decodes_with_twice_the_tpot_take_half_of_the_time() -> None:
    running = [decode(f"r{i}", 100, slack_ms=50, tpot_s=0.1) for i in range(400)]
    assert too_long_s(asked(449), running) is None
    assert too_long_s(asked(451), running) is not None


def test_few_answers_are_let_in_however_many_decodes_run() -> None:
    """A tenth of 50 ms is 100 answers."""
    running = [decode(f"r{i}", 100, slack_ms=50) for i in range(900)]
    assert too_long_s(asked(99), running) is None
    assert too_long_s(asked(101), running) is not None


def test_a_tpot_that_no_decode_can_keep_is_not_judged_here() -> None:
    assert too_long_s(asked(200, tpot_s=0.001)) is None
    running = [decode("never", 100, slack_ms=50, tpot_s=0.001)]
    assert too_long_s(asked(600), running) is None
