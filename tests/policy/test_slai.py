"""slai against examples computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from views import begun, decode, prompt, view_of

from slosched.core import Request, SchedulerOutput
from slosched.policy import SLAI
from slosched.policy.kit.deadlines import Deadlines
from slosched.policy.published.slai import StartOrder
from slosched.policy.spec import make_policy


def after_steps(*steps_ms: float, **options: object) -> SLAI:
    """Return the policy at time 0 after steps of these lengths."""
    policy = SLAI(**options)
    now_s = -sum(steps_ms) / 1e3
    for step_ms in steps_ms:
        policy.schedule(view_of([decode("before", 10, 1000)], model=None, now_s=now_s))
        now_s += step_ms / 1e3
    return policy


def plan(policy: SLAI, *requests: Request, num_blocks: int = 100_000) -> SchedulerOutput:
    return policy.schedule(view_of(requests, model=None, num_blocks=num_blocks, block_size=16))


# Mean step 20 ms, offset 5 steps: last schedulable time 100 ms before a token is due.
# critical: due in 90 ms, since 10 ms ago.  waits: due in 110 ms, not before 10 ms from now.
def test_a_decode_waits_until_its_last_schedulable_time() -> None:
    requests = (decode("waits", 100, 110), decode("critical", 100, 90), prompt("p", 600, 500))
    output = plan(after_steps(20, 20), *requests)
    assert list(output.num_scheduled_tokens.items()) == [("critical", 1), ("p", 511)]


def test_what_the_budget_leaves_goes_to_the_other_decodes() -> None:
    requests = (decode("waits", 100, 110), decode("critical", 100, 90), prompt("p", 510, 500))
    output = plan(after_steps(20, 20), *requests)
    assert list(output.num_scheduled_tokens) == ["critical", "p", "waits"]


def test_the_offset_follows_the_mean_of_all_steps() -> None:
    """(10 + 20 + 60) / 3 = 30 ms: 150 ms before."""
    requests = (decode("critical", 100, 140), decode("waits", 100, 160), prompt("p", 600, 500))
    assert "waits" not in plan(after_steps(10, 20, 60), *requests).num_scheduled_tokens
    assert "critical" in plan(after_steps(10, 20, 60), *requests).num_scheduled_tokens


def test_a_gap_without_work_is_no_step() -> None:
    """A second passes until `new` arrives; the mean stays 20 ms."""
    policy = after_steps(20, 20)
    policy.schedule(view_of([prompt("new", 10, 2000)], model=None, now_s=1.0))
    requests = (decode("waits", 100, 1020 + 110), prompt("p", 600, 2000))
    output = policy.schedule(view_of(requests, model=None, now_s=1.02))
    assert "waits" not in output.num_scheduled_tokens


def test_the_time_of_another_policys_step_is_no_step() -> None:
    """The turn of a class takes 90 ms; the mean stays 20 ms."""
    policy = after_steps(20, 20)
    policy.schedule(view_of([decode("before", 10, 1000)], model=None))
    requests = (decode("waits", 100, 110 + 110), prompt("p", 600, 2000))
    view = view_of(requests, model=None, now_s=0.11)
    output = policy.schedule(replace(view, follows_another=True))
    assert "waits" not in output.num_scheduled_tokens


@pytest.mark.parametrize(("num_blocks", "is_served"), [(67, False), (65, True)])
def test_decodes_are_critical_earlier_where_the_cache_is_full(
    num_blocks: int, is_served: bool
) -> None:
    """63 of 65 blocks are 0.969, of 67 0.940; 10 steps are 200 ms, 5 are 100."""
    requests = (decode("d", 990, 150), begun("p", 16, 1, 500))
    policy = after_steps(20, 20, token_budget=15)
    output = plan(policy, *requests, num_blocks=num_blocks)
    assert ("d" in output.num_scheduled_tokens) is is_served


def test_what_is_cached_of_a_prompt_does_not_make_it_long() -> None:
    """Of 1,000 tokens 930 are in the prefix cache; who is computed again computes its outputs."""
    cached, again = prompt("cached", 1000, 500), prompt("again", 60, 500)
    cached.num_computed_tokens, again.num_output_tokens = 930, 30
    again.token_times_s += [0.0] * 30
    queue = (again, prompt("plain", 80, 500), cached)
    assert list(plan(SLAI(), *queue).num_scheduled_tokens) == ["cached", "plain", "again"]


def test_prompts_begun_come_first_then_the_strict_tier_then_the_shortest() -> None:
    """A TPOT of 20 ms is stricter than 50."""
    requests = (
        begun("begun", 200, 100, 500),
        prompt("long", 90, 400),
        prompt("short", 80, 500),
        prompt("strict", 100, 500, tpot_s=0.02),
    )
    assert list(plan(SLAI(), *requests).num_scheduled_tokens) == [
        "begun",
        "strict",
        "short",
        "long",
    ]
    no_tiers = SLAI(tiers_first=False)
    assert list(plan(no_tiers, *requests).num_scheduled_tokens)[1:] == ["short", "long", "strict"]
    fcfs = SLAI(tiers_first=False, start=StartOrder.FCFS)
    assert list(plan(fcfs, *requests).num_scheduled_tokens)[1:] == ["long", "short", "strict"]


@pytest.mark.parametrize(("deadlines", "is_served"), [("tbt", True), ("run", False)])
def test_tokens_out_early_bank_nothing_under_tbt(deadlines: str, is_served: bool) -> None:
    """Its last token came 40 ms ago, TPOT 50 ms; by the run's rule, the next is due in 900 ms."""
    early = decode("early", 100, 10)
    early.deadline_s = 0.9
    policy = after_steps(20, 20, deadlines=Deadlines(deadlines))
    output = plan(policy, early, prompt("p", 600, 500))
    assert ("early" in output.num_scheduled_tokens) is is_served


def test_a_critical_decode_takes_the_blocks_of_the_last_prompt_begun() -> None:
    """The decode holds 62 blocks and needs another; the prompts hold one each."""
    requests = (decode("d", 993, 0), begun("first", 100, 16, 500), begun("last", 100, 16, 500))
    output = plan(after_steps(20, 20), *requests, num_blocks=64)
    assert output.preempted == ("last",)
    assert output.num_scheduled_tokens == {"d": 1}


def test_the_budget_is_for_decodes_too() -> None:
    output = plan(SLAI(token_budget=2), *(decode(f"d{i}", 100, -9 + i) for i in range(4)))
    assert list(output.num_scheduled_tokens) == ["d0", "d1"]


def test_reset_forgets_the_steps() -> None:
    policy = after_steps(20, 20)
    policy.reset()
    requests = (decode("waits", 100, 90), prompt("p", 600, 500))
    assert "waits" not in plan(policy, *requests).num_scheduled_tokens


@pytest.mark.parametrize("field", ["token_budget", "offset_steps", "full_kv"])
def test_nonsense_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} must be"):
        make_policy(f"slai:{field}=-1")
