"""scorpio against credits, sums and virtual batches counted by hand."""

from __future__ import annotations

import math

import pytest
from factories import make_model
from views import R, flat_model, view_of

from slosched.core import SLO, EndReason, Limits, RequestStatus, SchedulerOutput
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.policy import Scorpio
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest, synthesize

MODEL = flat_model(5e-3, 0.5e-3)
"""T = 5 ms + 0.5 ms a token: 10 decodes take 10 ms."""


def decide(requests: list[R], policy: Scorpio | None = None, now_s: float = 0.0) -> SchedulerOutput:
    return (policy or Scorpio()).schedule(view_of(requests, MODEL, now_s=now_s))


@pytest.mark.parametrize(
    ("tpot_s", "steps"),
    [
        (0.03, [1, 2, 3, 4, 5, 6]),
        (0.06, [2, 4, 6]),  # TRP 1/2: credits 0.5, 1.0
        (0.05, [2, 4, 5]),  # TRP 3/5: 0.6, 1.2 - 1, 0.8, 1.4 - 1, 1.0 - 1, 0.6
        (0.3, []),  # TRP 1/10
    ],
)
def test_a_decode_runs_as_often_as_its_tpot_asks_for(tpot_s: float, steps: list[int]) -> None:
    policy = Scorpio()
    queue = [R("strict", 10, 1.0, 0.03, out=1), R("lenient", 10, 1.0, tpot_s, out=1)]
    ran = [i for i in range(1, 7) if "lenient" in decide(queue, policy).num_scheduled_tokens]
    assert ran == steps
    assert "strict" in decide(queue, policy).num_scheduled_tokens


def test_who_was_promised_no_tpot_still_runs_in_one_step_of_twenty() -> None:
    policy = Scorpio()
    queue = [R("strict", 10, 1.0, 0.03, out=1), R("any", 10, 1.0, math.inf, out=1)]
    ran = [i for i in range(1, 61) if "any" in decide(queue, policy).num_scheduled_tokens]
    assert ran == [20, 40, 60]
    policy.reset()
    assert "any" not in decide(queue, policy).num_scheduled_tokens
    alone = [R("any", 10, 1.0, math.inf, out=1)]
    assert "any" in decide(alone, policy).num_scheduled_tokens


def test_of_too_many_with_credit_those_with_most_run() -> None:
    """There is budget for two; the one that was left out has more credit in the next step."""
    policy = Scorpio(token_budget=2)
    queue = [R(name, 10, 1.0, 0.03, out=1) for name in "abc"] + [R("d", 10, 1.0, 0.06, out=1)]
    assert list(decide(queue, policy).num_scheduled_tokens) == ["a", "b"]
    assert list(decide(queue, policy).num_scheduled_tokens) == ["a", "c"]


def test_prompts_go_by_deadline_and_the_unattainable_are_rejected() -> None:
    """100 tokens take 55 ms.  In order of deadline: 55 ms, 110 > 100 ms, 110 <= 115 ms."""
    queue = [R("c", 100, 0.115), R("b", 100, 0.1), R("a", 100, 0.06)]
    output = decide(queue)
    assert list(output.num_scheduled_tokens) == ["a", "c"]
    assert output.rejected == {"b": EndReason.INFEASIBLE}
    late = decide([R("a", 100, 0.06)], now_s=0.1)
    assert late.rejected == {"a": EndReason.EXPIRED}


def test_a_prompt_that_has_begun_is_before_it_and_is_not_rejected() -> None:
    """It has 50 tokens left, which take 30 ms; the new one's own take 55 ms."""
    begun = R("begun", 100, 0.01, done=50)
    for due_s, is_rejected in ((0.0845, True), (0.0855, False)):
        output = decide([begun, R("new", 100, due_s)])
        assert ("new" in output.rejected) == is_rejected
        assert output.num_scheduled_tokens["begun"] == 50


@pytest.mark.parametrize(
    ("tpot_s", "starts"),
    [(0.02, True), (0.01001, False), (0.005, False)],
)
def test_a_prompt_starts_if_the_virtual_batch_keeps_the_least_tpot(
    tpot_s: float, *, starts: bool
) -> None:
    """8 decodes at 10 ms and 3 at 20 ms are a virtual batch of 9.5; another at 20 ms makes it 10
    ms.

    One more at 10 ms makes it 10.5: 10.25 ms for 10.  One at 5 ms is a batch of 1 + 8/2 + 3/4.
    """
    queue = [R(f"s{i}", 10, 1.0, 0.01001, out=1) for i in range(8)]
    queue += [R(f"l{i}", 10, 1.0, 0.02002, out=1) for i in range(3)]
    output = decide([*queue, R("p", 10, 1.0, 2.0 * 0.01001 if tpot_s == 0.02 else tpot_s)])
    assert ("p" in output.num_scheduled_tokens) == starts
    assert not output.rejected


def test_epsilon_leaves_room_for_prompts_in_the_same_step() -> None:
    """6 decodes take 8 ms, times 1.25 10 ms; 7 take 8.5 ms, times 1.25 10.6 ms."""
    for num, starts in ((5, True), (6, False)):
        queue = [R(f"d{i}", 10, 1.0, 0.01001, out=1) for i in range(num)]
        output = decide([*queue, R("p", 10, 1.0, 0.01001)], Scorpio(epsilon=1.25))
        assert ("p" in output.num_scheduled_tokens) == starts


def test_who_may_not_start_waits_and_those_behind_it_are_asked() -> None:
    queue = [R(f"d{i}", 10, 1.0, 0.01001, out=1) for i in range(9)]
    queue += [R("strict", 10, 0.5, 0.005), R("like", 10, 0.6, 0.01001), R("more", 10, 0.7, 0.01001)]
    output = decide(queue)
    assert "like" in output.num_scheduled_tokens
    assert not {"strict", "more", *output.rejected} & output.num_scheduled_tokens.keys()


def test_half_of_the_expected_output_is_added_to_the_length() -> None:
    """T = 5 ms + 10 us a token of context: two with 145 take 7.9 ms, two with 200 take 9 ms."""
    model = LinearModel(LinearCoefficients(0, 0, 10e-6, 0, 0, 0, constant_s=5e-3))
    queue = [R("d", 100, 1.0, 0.008, out=1), R("p", 100, 1.0, 0.008)]
    for prior, starts in ((90, True), (200, False)):
        output = Scorpio(prior_output_tokens=prior).schedule(view_of(queue, model))
        assert ("p" in output.num_scheduled_tokens) == starts


def test_the_first_starts_whatever_it_was_promised() -> None:
    assert decide([R("p", 10, 1.0, 0.001)]).num_scheduled_tokens == {"p": 10}


def test_strict_requests_are_kept_by_giving_lenient_ones_fewer_tokens() -> None:
    """10 strict and 10 lenient decodes: 15 ms a step together, 10.5 ms or less by credit."""
    strict, lenient = SLO(1.0, 0.0112), SLO(1.0, 0.1)
    lines = [TraceRequest(f"r{i}", 0, 1, 60, (strict, lenient)[i % 2]) for i in range(20)]
    requests = simulate(
        Trace.of(lines, "two tiers"), Scorpio(prior_output_tokens=1), MODEL, SimulationConfig()
    )
    for request in requests:
        assert request.status is RequestStatus.FINISHED
        first_s, last_s = request.token_times_s[0], request.token_times_s[-1]
        assert (last_s - first_s) / 59 <= request.slo.tpot_s


def test_planning_beside_grouped_decodes_changes_nothing() -> None:
    trace = synthesize(
        "poisson", num_requests=150, prompt=800, output=60, slo=SLO(0.5, 0.025), rate=40.0, seed=5
    )
    config = SimulationConfig(Limits(max_num_batched_tokens=8192))
    grouped = simulate(trace, Scorpio(), make_model(), config)
    one_by_one = simulate(trace, Scorpio(), make_model(), config, on_step=lambda _: None)
    assert [r.token_times_s for r in grouped] == [r.token_times_s for r in one_by_one]
    assert {r.end_reason for r in grouped} == {EndReason.STOP, EndReason.INFEASIBLE}


def test_it_asks_for_a_latency_model() -> None:
    bare = view_of([R("p", 10, 1.0)], model=None)
    with pytest.raises(ValueError, match="latency model"):
        Scorpio().schedule(bare)


@pytest.mark.parametrize("option", ["token_budget", "epsilon", "prior_output_tokens"])
def test_nonsense_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=r"must be (positive|at least 1), not 0"):
        make_policy(f"scorpio:{option}=0")
