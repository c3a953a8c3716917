"""medha_lars against slacks and chunks computed by hand, with T = 5 ms + 50 µs a token."""

from __future__ import annotations

import pytest
from views import R, view_of

from slosched.core import EndReason, SchedulerOutput
from slosched.policy import EDF
from slosched.policy.kit.drop import Drop
from slosched.policy.published.medha_lars import MedhaLARS
from slosched.testing import check_policy


def decide(requests: list[R], now_s: float = 0.0, **options: object) -> SchedulerOutput:
    return MedhaLARS(**options).schedule(view_of(requests, now_s=now_s))  # type: ignore[arg-type]


@pytest.mark.parametrize(("short_arrived_s", "first"), [(0.6, "long"), (0.5, "short")])
def test_the_least_relative_slack_goes_first(short_arrived_s: float, first: str) -> None:
    """At 1 s, half of 10,000 tokens are left: (2.525 - 1 - 0.255) / 2.525 = 0.503.

    The short one takes 10 ms of its TTFT of 1 s: 0.59 after 0.4 s, 0.49 after 0.5 s.  Its deadline
    is the earlier one in both cases.
    """
    queue = [
        R("long", 10_000, due_s=2.525, done=5000),
        R("short", 100, due_s=short_arrived_s + 1.0, arrival_s=short_arrived_s),
    ]
    assert next(iter(decide(queue, now_s=1.0, step_s=10.0).num_scheduled_tokens)) == first
    edf = EDF(token_budget=10_000).schedule(view_of(queue, now_s=1.0))
    assert next(iter(edf.num_scheduled_tokens)) == "short"


def test_chunks_are_cut_to_the_time_of_the_step() -> None:
    """(50 - 5) / 0.05 = 900 tokens, one of them the decode's, and strictly below."""
    queue = [R("d", 100, due_s=0.05, out=1), R("p", 5000, due_s=1.0), R("q", 5000, due_s=9.0)]
    assert decide(queue, step_s=0.05001).num_scheduled_tokens == {"d": 1, "p": 899}


def test_a_long_prompt_with_slack_leaves_its_share_of_the_step() -> None:
    """15,000 tokens take 755 ms of its TTFT of 1.51 s.  Half is slack, so it gets 25 ms of 50.

    5 ms of these are the step's own, which leaves 400 tokens.  500 are left for the short one
    behind it.
    """
    queue = [R("long", 20_000, due_s=1.51, done=5000), R("short", 5000, due_s=100.0)]
    shared = decide(queue, step_s=0.05001, long_tokens=5000).num_scheduled_tokens
    assert shared == {"long": 400, "short": 500}
    alone = decide(queue, step_s=0.05001, long_tokens=5001).num_scheduled_tokens
    assert alone == {"long": 900}


def test_one_long_prompt_a_step() -> None:
    queue = [
        R("a", 20_000, due_s=1.51, done=5000),
        R("b", 20_000, due_s=2.0, done=5000),
        R("c", 100, due_s=100.0),
    ]
    output = decide(queue, step_s=0.05001, long_tokens=5000)
    assert output.num_scheduled_tokens == {"a": 400, "c": 100}


def test_a_late_one_leaves_nothing() -> None:
    queue = [R("long", 20_000, due_s=0.1, done=5000), R("short", 5000, due_s=100.0)]
    output = decide(queue, step_s=0.05001, long_tokens=5000)
    assert output.num_scheduled_tokens == {"long": 900}


def test_prompts_wait_while_the_decodes_alone_take_the_time_of_the_step() -> None:
    """100 decodes take 10 ms.  As in Vajra's `get_max_chunk_size_for_seq`, nothing is left then."""
    decodes = [R(f"d{i}", 100, due_s=0.05, out=1) for i in range(100)]
    late = R("p", 5000, due_s=0.01)
    assert "p" not in decide([*decodes, late], step_s=0.01).num_scheduled_tokens
    assert decide([*decodes, late], step_s=0.01006).num_scheduled_tokens["p"] == 1


def test_dropping_is_an_option() -> None:
    queue = [R("p", 100, due_s=-0.1), R("q", 100, due_s=1.0)]
    assert not decide(queue).rejected
    assert decide(queue, drop=Drop.EXPIRED).rejected == {"p": EndReason.EXPIRED}


def test_it_obeys_the_laws_with_short_steps_and_long_prompts() -> None:
    check_policy(
        lambda: MedhaLARS(step_s=0.01, long_tokens=8), max_examples=12, conserves_work=False
    )


@pytest.mark.parametrize("option", ["step_s", "long_tokens"])
def test_an_impossible_option_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be .* not 0"):
        MedhaLARS(**{option: 0})
