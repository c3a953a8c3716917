"""Which TPOT is worth keeping when not all prompts can be in time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from views import R, flat_model, view_of

from slosched.core import SLO, DeadlineRule, EndReason, Limits, Request, SchedulerView
from slosched.policy.kit.arrivals import Arrivals
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.unkeepable import Kept, split_unkeepable
from slosched.policy.kit.worth import Worth

MODEL = flat_model()
"""5 ms + 50 us a token: the decodes take 5.2 ms, and a step of 10 ms has time for 96 prompt tokens,
one of 50 ms for 896."""
NOW_S = 1.0


def decodes() -> list[R]:
    tpots_s = (0.010, 0.010, 0.050, 0.050)
    return [R(f"d{i}", 11, 9.0, tpot_s=tpot_s, out=1) for i, tpot_s in enumerate(tpots_s)]


def arrivals(num: int, tokens: int, share_hasty: float, ttft_s: float = 1.0) -> list[Request]:
    """Return as many requests as arrived in the last second."""
    num_hasty = round(share_hasty * num)
    return [
        Request(f"r{i}", i / num, tokens, 512, SLO(ttft_s, 0.010 if i < num_hasty else 0.050))
        for i in range(num)
    ]


def worth_of(view: SchedulerView) -> Worth:
    """Return what judges once those that wait have arrived."""
    seen = Arrivals()
    seen.see(view.waiting)
    return Worth(seen)


def chosen(
    waiting: list[Request],
    rule: DeadlineRule = DeadlineRule.TBT,
    of: Sequence[R] = tuple(decodes()),
) -> float:
    """Return the TPOT to which the pace of the decodes `of` is raised, or their own."""
    limits = Limits(deadline_rule=rule)
    view: SchedulerView = view_of([*of, *waiting], MODEL, now_s=NOW_S, limits=limits)
    pace = Pace.of(view.running, MODEL, NOW_S)
    worth = worth_of(view)
    worth.judge(pace, view.running, view)
    return worth.kept(pace, MODEL, lambda _: 1.0).tpot_s


def test_while_all_prompts_go_through_the_smallest_tpot_is_kept() -> None:
    """40 prompts of 200 tokens are 8,000 tokens in a second, 80 in each step of 10 ms."""
    assert chosen(arrivals(40, 200, 0.1)) == 0.010


def test_a_tpot_of_a_few_that_keeps_many_prompts_out_is_not_kept() -> None:
    """In steps of 10 ms 60 % of 16,000 tokens go through, in steps of 50 ms all."""
    assert chosen(arrivals(40, 400, 0.1)) == 0.050


def test_a_tpot_of_many_is_kept_though_prompts_are_late() -> None:
    assert chosen(arrivals(40, 400, 0.6)) == 0.010


def test_who_asks_for_a_tpot_that_cannot_be_kept_does_not_count_for_the_next_one() -> None:
    """No step lasts 4 ms, which half of the arrivals ask for.  With 10 ms, which nobody else asks
    for, 60 % of the prompts go through, and the half of these are good.  With 50 ms all go through,
    and half of all are good."""
    waiting = [
        replace(each, slo=SLO(1.0, 0.004 if i % 2 else 0.050))
        for i, each in enumerate(arrivals(40, 400, 0.0))
    ]
    assert chosen(waiting) == 0.010, "all TPOTs of the decodes can be kept"
    assert chosen(waiting, of=[*decodes(), R("lost", 11, 9.0, tpot_s=0.004, out=1)]) == 0.050


def test_the_ttft_that_a_request_does_not_use_is_left_for_its_tokens() -> None:
    """Under `envelope` 9 of 10 s, divided among 20 tokens, allow for any TPOT."""
    waiting = arrivals(40, 400, 0.6, ttft_s=10.0)
    assert chosen(waiting, DeadlineRule.ENVELOPE) == 0.050
    assert chosen(waiting) == 0.010


@pytest.mark.parametrize("rule", DeadlineRule)
def test_who_was_promised_no_ttft_counts_like_others(rule: DeadlineRule) -> None:
    assert chosen(arrivals(40, 400, 0.1, ttft_s=math.inf), rule) == 0.050
    assert chosen(arrivals(40, 400, 0.6, ttft_s=math.inf), DeadlineRule.TBT) == 0.010


@pytest.mark.parametrize("ttft_s", [1.0, math.inf])
def test_whose_tpot_is_not_kept_goes_last(ttft_s: float) -> None:
    hasty, patient = arrivals(2, 100, 0.5, ttft_s)
    kept, late = split_unkeepable([(hasty, 0.01), (patient, 0.01)], view_of([], MODEL), Kept(0.05))
    assert (kept, late) == ([(patient, 0.01)], [hasty])


def test_who_asks_for_one_token_has_no_tpot_to_keep() -> None:
    """Six of ten ask for 10 ms a token, most of them for one token."""
    waiting = [
        replace(r, max_tokens=1) if i < 20 else r for i, r in enumerate(arrivals(40, 400, 0.6))
    ]
    assert chosen(waiting) == 0.050
    prompts = [(r, 0.01) for r in (waiting[0], waiting[20], waiting[39])]
    kept, late = split_unkeepable(prompts, view_of([], MODEL), Kept(0.05))
    assert (kept, late) == ([prompts[0], prompts[2]], [waiting[20]])


def test_too_few_arrivals_say_nothing() -> None:
    assert chosen(arrivals(12, 4000, 0.1)) == 0.010


def test_it_is_judged_only_when_requests_arrive() -> None:
    seen, view = Arrivals(), view_of([*decodes(), *arrivals(40, 400, 0.1)], MODEL, now_s=NOW_S)
    worth, pace = Worth(seen), Pace.of(view.running, MODEL, NOW_S)
    assert worth.is_known_of(pace)
    seen.see(view.waiting)
    assert not worth.is_known_of(pace)
    worth.judge(pace, view.running, view)
    seen.see(view.waiting)
    assert worth.is_known_of(pace)


def test_one_tpot_of_decodes_and_arrivals_leaves_no_choice() -> None:
    view = view_of([*decodes()[:2], *arrivals(40, 400, 1.0)], MODEL, now_s=NOW_S)
    seen, pace = Arrivals(), Pace.of(view.running, MODEL, NOW_S)
    worth = Worth(seen)
    seen.see(view.waiting)
    assert worth.is_known_of(pace)
    seen.see(arrivals(41, 400, 0.9)[-1:])
    assert not worth.is_known_of(pace)


def judged(waiting: list[Request], num_decodes: int, output_tokens: int) -> tuple[Worth, Pace]:
    """Return what is worth it, and the pace, once 20 requests have ended with so many tokens."""
    of = [R(f"d{i}", 11, 9.0, tpot_s=(0.010, 0.050)[i % 2], out=1) for i in range(num_decodes)]
    view = view_of([*of, *waiting], MODEL, now_s=NOW_S)
    worth, pace = worth_of(view), Pace.of(view.running, MODEL, NOW_S)
    for ended in waiting[:20]:
        ended.num_output_tokens, ended.end_reason = output_tokens, EndReason.LENGTH
        ended.end_s = NOW_S
    worth.judge(pace, view.running, view)
    return worth, worth.kept(pace, MODEL, lambda tpot_s: tpot_s + 7)


def test_a_tpot_is_held_for_which_there_are_too_many_decodes_now() -> None:
    """The step of 200 decodes takes 15 ms.  But in steps of 10 ms with 5 of them there is time for
    95 prompt tokens, and 8,000 come in a second."""
    worth, pace = judged(arrivals(40, 200, 0.5), num_decodes=200, output_tokens=10)
    assert pace.all_s == pytest.approx(0.015)
    assert (pace.tpot_s, pace.first_slack_s) == (0.010, pytest.approx(7.01))
    assert pace.least_s == 0.010
    assert worth.least == (0.010, 0.0)


def test_no_tpot_is_held_any_more_once_there_was_no_choice() -> None:
    """The latest 64 arrivals all ask for 50 ms, as all decodes do; then some that came earlier, and
    ask for 10 ms, become decodes."""
    worth, held = judged(arrivals(40, 200, 0.5), num_decodes=200, output_tokens=10)
    assert held.tpot_s == 0.010
    of = [R(f"d{i}", 11, 9.0, tpot_s=0.050, out=1) for i in range(200)]
    worth._arrivals.see(
        [replace(r, request_id=f"later {r.request_id}") for r in arrivals(64, 200, 0.0)]
    )
    assert worth.is_known_of(Pace.of(view_of(of, MODEL, now_s=NOW_S).running, MODEL, NOW_S))
    of += [R(f"e{i}", 11, 9.0, tpot_s=0.010, out=1) for i in range(50)]
    pace = Pace.of(view_of(of, MODEL, now_s=NOW_S).running, MODEL, NOW_S)
    assert pace.tpot_s == 0.050
    assert worth.kept(pace, MODEL, lambda _: 1.0) == pace


@pytest.mark.parametrize("num_decodes", [4, 200])
def test_a_tpot_that_lets_too_few_requests_through_in_the_long_run_is_not_kept(
    num_decodes: int,
) -> None:
    """With 500 tokens of output 36 % of the prompts go through in steps of 10 ms, and 64 % in steps
    of 50 ms, for which nine of ten ask.  If there are few decodes now, that is since prompts were
    turned away."""
    worth, pace = judged(arrivals(40, 200, 0.1), num_decodes, output_tokens=500)
    assert pace.tpot_s == 0.050
    assert worth.least == (0.050, 0.0)


def test_of_the_tpots_of_arrivals_no_decode_has_to_ask_for_the_smallest() -> None:
    of = [R(f"d{i}", 11, 9.0, tpot_s=0.050, out=1) for i in range(200)]
    view = view_of([*of, *(waiting := arrivals(40, 200, 0.5))], MODEL, now_s=NOW_S)
    worth, pace = worth_of(view), Pace.of(view.running, MODEL, NOW_S)
    for ended in waiting[:20]:
        ended.num_output_tokens, ended.end_reason = 10, EndReason.LENGTH
        ended.end_s = NOW_S
    worth.judge(pace, view.running, view)
    assert worth.least.tpot_s == 0.010, "who asks for it is not given up"
    assert worth.kept(pace, MODEL, lambda _: 1.0) == pace


def test_a_raised_pace_is_that_of_decodes_that_ask_for_less() -> None:
    pace = Pace.of(view_of(decodes()).running, MODEL, 0.0)
    raised = pace.raised(0.050, MODEL, lambda tpot_s: tpot_s + 7)
    assert (raised.tpot_s, raised.first_slack_s) == (0.050, pytest.approx(7.05))
    assert raised.tiers == [(0.050, 4)]
    assert raised.steps_per_s == pytest.approx(20.0)
    assert raised.all_s == pace.all_s
    assert pace.raised(1.0, MODEL, lambda _: 0.0).tpot_s == 0.050, "that of the slowest"
