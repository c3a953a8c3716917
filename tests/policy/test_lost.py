"""Decodes that miss their SLO whatever comes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from views import R, begun, decode, flat_model, view_of

from slosched.core import DeadlineRule, Limits, Request, SchedulerView
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.lost import lost_due_by, num_lost
from slosched.policy.kit.pace import Pace

MODEL = flat_model()
"""5 ms + 50 us a token."""


def seen(requests: Sequence[R | Request], rule: DeadlineRule) -> SchedulerView:
    return view_of(requests, MODEL, limits=Limits(deadline_rule=rule))


@pytest.mark.parametrize(("rule", "num"), [("envelope", 2), ("mean_tpot", 0), ("tbt", 0)])
def test_only_the_envelope_forgives_no_late_token(rule: str, num: int) -> None:
    decodes = [decode(f"d{i}", 100, slack_ms) for i, slack_ms in enumerate((-20, -1, 0, 30))]
    assert num_lost(decodes, seen(decodes, DeadlineRule(rule))) == num


def test_if_all_are_lost_none_is_left_out() -> None:
    decodes = [decode("a", 100, -20), decode("b", 100, -1)]
    assert num_lost(decodes, seen(decodes, DeadlineRule.ENVELOPE)) == 0


def test_lost_decodes_count_as_if_they_asked_for_the_largest_tpot() -> None:
    hasty = decode("hasty", 100, -1, tpot_s=0.01)
    others = [decode("a", 100, 20, tpot_s=0.05), decode("b", 100, 30, tpot_s=0.1)]
    pace = Pace.of([hasty, *others], MODEL, 0.0, num_lost=1)
    assert (pace.tpot_s, pace.first_slack_s) == (0.05, 0.02)
    assert pace.tiers == [(0.05, 1), (0.1, 2)]
    assert pace.all_s == MODEL.predict(pace.shape)
    assert pace.shape.num_decodes == 3


def test_a_lost_decode_shortens_no_step_but_gets_its_token() -> None:
    """20 ms of the other decode, minus 2.5 of margin, are short of the least step of 32.5 ms, which
    a late decode would not lengthen: that is time for 550 tokens."""
    other, long = R("other", 11, 0.045, out=1), R("long", 1000, 9.0)
    lost = decode("lost", 11, -1, tpot_s=0.02)
    tokens = {
        rule: Goodput().schedule(seen([lost, other, long], rule)).num_scheduled_tokens
        for rule in (DeadlineRule.ENVELOPE, DeadlineRule.MEAN_TPOT)
    }
    envelope, mean = tokens[DeadlineRule.ENVELOPE], tokens[DeadlineRule.MEAN_TPOT]
    assert set(envelope) == set(mean) == {"lost", "other", "long"}
    assert envelope["long"] > 600 > 300 > mean["long"]


def test_a_lost_decode_gets_a_token_as_often_as_the_largest_tpot_asks_for() -> None:
    lost = decode("lost", 100, -40, tpot_s=0.02)  # its last token came 60 ms ago
    others = [decode("a", 100, 20, tpot_s=0.05), decode("b", 100, 30, tpot_s=0.1)]
    assert lost_due_by([lost], others, 0.039) == []
    assert lost_due_by([lost], others, 0.041) == [lost]


def test_a_lost_prompt_with_one_token_left_has_no_token_whose_time_counts() -> None:
    """It is late for its first token, and the step that computes its last prompt token emits it."""
    silent, other = begun("silent", 100, 99, -1), R("other", 11, 0.045, tpot_s=0.1, out=1)
    assert lost_due_by([silent], [other.request()], 0.0) == [silent]
    prompts = [R("a", 519, 0.040), R("b", 900, 0.060)]
    output = Goodput().schedule(seen([silent, other, *prompts], DeadlineRule.ENVELOPE))
    assert output.num_scheduled_tokens["silent"] == 1


def test_prompts_that_would_be_late_go_before_what_is_lost() -> None:
    """Not both prompts can be in time in a step of 50 ms.  The lost decode has its turn within 1 s."""
    lost = decode("lost", 11, -1, tpot_s=0.02)
    others = [R("quick", 11, 9.0, out=1), R("slow", 11, 9.0, tpot_s=1.0, out=1)]
    prompts = [R("a", 519, 0.040), R("b", 900, 0.060)]
    output = Goodput().schedule(seen([lost, *others, *prompts], DeadlineRule.ENVELOPE))
    assert list(output.num_scheduled_tokens) == ["a", "quick", "slow", "b", "lost"]
