"""Plans beside a group of decodes are those that a policy makes when it sees each of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from views import decode, prompt, view_of

from slosched.core import DeadlineRule, Limits, PlansBesideDecodes
from slosched.policy.spec import make_policy
from slosched.simulator.decodes import GroupedDecodes

POLICIES = [
    "fcfs",
    "edf:drop=infeasible",
    "sjf",
    "sarathi",
    "slo_aware",
    "slo_aware:late=bind",
    "goodput",
]


@pytest.mark.parametrize("policy", POLICIES)
@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.02, 0.2, 61.0]), st.integers(0, 1)),
        min_size=2,
        max_size=8,
    ),
    st.sampled_from([(0.0053, 0.0053), (0.05, 0.5)]),
    st.lists(
        st.tuples(
            st.sampled_from([1, 100, 3000]), st.sampled_from([-0.1, 0.004, 0.1, 2.0, 61.0, 400.0])
        ),
        max_size=8,
    ),
    st.booleans(),
    st.sampled_from(DeadlineRule),
    st.sampled_from([0, 0, 1, 3]),
    st.sampled_from([410, 500, 800, 1_000_000]),
)
@example([(0.02, 0)] * 8, (0.0053, 0.0053), [(100, 0.1)], False, DeadlineRule.MEAN_TPOT, 0, 1000)
@example([(61.0, 0)] * 2, (0.05, 0.5), [(100, 0.1)], False, DeadlineRule.MEAN_TPOT, 0, 1000)
@example([(0.2, 0)] * 2, (0.05, 0.5), [(100, 0.1)], True, DeadlineRule.MEAN_TPOT, 0, 1000)
def test_a_plan_beside_a_group_is_the_plan_for_all(
    policy: str,
    decodes: list[tuple[float, int]],
    tpots_s: tuple[float, float],
    prompts: list[tuple[int, float]],
    is_eased: bool,
    rule: DeadlineRule,
    num_free_seats: int,
    num_blocks: int,
) -> None:
    """Eight decodes take 5.4 ms, so that those of 5.3 ms have to give way to each other."""
    running = [
        decode(f"d{i}", 50, 1e3 * slack_s, tpots_s[at]) for i, (slack_s, at) in enumerate(decodes)
    ]
    running[0].asked_slo = running[0].slo if is_eased else None
    waiting = [prompt(f"p{i}", n, 1e3 * slack_s) for i, (n, slack_s) in enumerate(prompts)]
    limits = Limits(2048, max_num_seqs=len(running) + num_free_seats, deadline_rule=rule)
    view = view_of([*running, *waiting], limits=limits, num_blocks=num_blocks)
    group = GroupedDecodes(view.kv, rule)
    for request in running:
        group.join(request, num_tokens_left=5)
    planner = make_policy(policy)
    assert isinstance(planner, PlansBesideDecodes)
    beside = planner.schedule_beside(group, replace(view, running=()))
    plan = make_policy(policy).schedule(view)
    event("declined" if beside is None else "planned")
    if beside is None:
        return
    tokens = {request.request_id: 1 for request in running} | dict(beside.num_scheduled_tokens)
    assert plan.num_scheduled_tokens == tokens
    assert beside.rejected == plan.rejected
    assert beside.is_at_leisure == plan.is_at_leisure
    assert beside.has_reserve == plan.has_reserve
    assert beside.shape == plan.shape
    assert not plan.preempted
