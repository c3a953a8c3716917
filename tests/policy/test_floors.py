"""Floors: the law for every policy, and turns worked by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from views import R, flat_model, view_of

from slosched.core import SLO, Limits, Request, SchedulerView
from slosched.metrics import RequestRecord
from slosched.perfmodel import load_model
from slosched.policy import FCFS, POLICIES, Floors, Goodput
from slosched.policy.kit.turn import plan_turn
from slosched.policy.spec import PolicySpecError, make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.testing.floor import check_floor
from slosched.testing.plans import LawBrokenError
from slosched.testing.random_scenarios import scenarios, search
from slosched.testing.scenario import Scenario
from slosched.workload import Trace, synthesize

MODEL = flat_model()
"""5 ms + 50 us a token."""


@pytest.mark.parametrize("name", POLICIES)
def test_a_class_gets_its_share_while_it_is_backlogged(name: str) -> None:
    @hypothesis.seed(0)
    @search(15, shrink=False)
    @given(scenarios(), st.sampled_from([0.1, 0.3, 0.5, 0.8]))
    def law(scenario: Scenario, share: float) -> None:
        check_floor(lambda: Floors(make_policy(name), tiers=f"mine={share}"), scenario, share)

    law()


@hypothesis.seed(0)
@search(30, shrink=False)
@given(scenarios())
def test_two_classes_get_their_shares(scenario: Scenario) -> None:
    both = partial(Floors, FCFS(), tiers="mine=0.3/others=0.5")
    check_floor(both, scenario, 0.3, num_floors=2)


def test_without_floors_the_law_breaks() -> None:
    @hypothesis.seed(0)
    @search(60, shrink=False)
    @given(scenarios())
    def law(scenario: Scenario) -> None:
        check_floor(FCFS, scenario, 0.8)

    with pytest.raises(LawBrokenError, match="the class is owed"):
        law()


@pytest.fixture(scope="module")
def overload() -> Trace:
    """Conversations at twice what an H100 keeps; a tenth of them may wait for long."""
    trace = synthesize("azure_conv", num_requests=500, rate=44.0, slo=SLO(1.0, 0.05), seed=3)
    requests = [
        replace(r, tier="batch", slo=SLO(60.0, 1.0)) if i % 10 == 0 else r
        for i, r in enumerate(trace.requests)
    ]
    return Trace.of(requests, trace.name)


def play(spec: str, trace: Trace) -> list[RequestRecord]:
    model = load_model("h100/llama-3.1-8b")
    done = simulate(trace, make_policy(spec), model, SimulationConfig(num_blocks=30_000))
    return [RequestRecord.from_request(request) for request in done]


def median_ttft_s(records: list[RequestRecord]) -> float:
    ttfts_s = sorted(r.ttft_s for r in records if r.tier == "batch" and r.ttft_s is not None)
    return ttfts_s[len(ttfts_s) // 2]


def test_in_overload_a_floor_serves_a_class_that_would_wait(overload: Trace) -> None:
    """Without a floor `goodput` serves batch requests only when all others are served."""
    without, with_floor = (
        play("goodput" + floors, overload) for floors in ("", "+floors:tiers=batch=0.1")
    )
    assert median_ttft_s(with_floor) < 0.5 * median_ttft_s(without)


def test_a_class_that_is_not_there_changes_nothing(overload: Trace) -> None:
    assert play("goodput+floors:tiers=absent=0.5", overload) == play("goodput", overload)


def test_the_inner_policy_does_not_take_turns_for_its_own_slow_steps(overload: Trace) -> None:
    """The model is right, so there is nothing to correct in what it predicts."""
    inner = Goodput()
    simulate(
        overload,
        Floors(inner, tiers="batch=0.3"),
        load_model("h100/llama-3.1-8b"),
        SimulationConfig(num_blocks=30_000),
    )
    assert inner._drift._num_steps > 30
    assert inner._drift._error == pytest.approx(0.0, abs=1e-6)


def tiered(view: SchedulerView, *mine: str) -> SchedulerView:
    """Return the view with these requests in the tier "batch"."""
    for request in (*view.running, *view.waiting):
        request.tier = "batch" if request.request_id in mine else None
    return view


def is_batch(request: Request) -> bool:
    return request.tier == "batch"


def test_a_turn_serves_the_class_first_and_decodes_of_others_in_the_rest() -> None:
    """With a share of a quarter, 100 tokens let 300 of others in: both decodes."""
    requests = [R("a", 50, 1.0, out=1), R("b", 50, 0.5, out=1), R("p", 500, 1.0), R("mine", 100, 9)]
    output = plan_turn(tiered(view_of(requests), "mine"), is_batch, 0.25, 2048)
    assert output is not None
    assert list(output.num_scheduled_tokens.items()) == [("mine", 100), ("b", 1), ("a", 1)]


def test_a_turn_leaves_tokens_for_decodes_of_others() -> None:
    """Of 8 tokens, 3 go to the decodes of others; the class has more to do than 5."""
    decodes = [R(f"d{i}", 50, 1.0, out=1) for i in range(3)]
    view = view_of([*decodes, R("mine", 100, 9)], limits=Limits(max_num_batched_tokens=8))
    output = plan_turn(tiered(view, "mine"), is_batch, 0.5, 2048)
    assert output is not None
    assert output.num_scheduled_tokens == {"mine": 5, "d0": 1, "d1": 1, "d2": 1}


def test_a_turn_takes_a_seat_from_the_youngest_of_the_others() -> None:
    view = view_of(
        [R("old", 50, 1.0, out=1), R("young", 50, 1.0, out=1), R("mine", 100, 9)],
        limits=Limits(max_num_seqs=2),
    )
    output = plan_turn(tiered(view, "mine"), is_batch, 0.5, 2048)
    assert output is not None
    assert output.preempted == ("young",)
    assert output.num_scheduled_tokens == {"mine": 100, "old": 1}


def test_a_turn_takes_no_blocks_that_a_begun_prompt_of_others_needs() -> None:
    """Two prompts that have begun would wait for each other's KV blocks for good.

    The begun one holds 32 of 160 tokens.  What is left is enough for it, or for the class, but not
    for both, so it is preempted.
    """
    prompts = [R("begun", 160, 1.0, done=32), R("mine", 100, 9)]
    view = view_of(prompts, num_blocks=160, limits=Limits(max_num_batched_tokens=64))
    output = plan_turn(tiered(view, "mine"), is_batch, 0.5, 2048)
    assert output is not None
    assert (output.preempted, output.num_scheduled_tokens) == (("begun",), {"mine": 64})


def test_who_leaves_no_watermark_has_its_turn_alone() -> None:
    """90 blocks and a watermark of 20 are more than there are; alone it goes below that."""
    limits = Limits(max_num_batched_tokens=64, num_watermark_blocks=20)
    requests = [R("other", 5, 1.0, out=1), R("young", 5, 1.0, out=1), R("mine", 90, 9)]
    view = view_of(requests, num_blocks=100, limits=limits)
    output = plan_turn(tiered(view, "mine"), is_batch, 0.5, 2048)
    assert output is not None
    assert output.preempted == ("young", "other")
    assert output.num_scheduled_tokens == {"mine": 62}


def test_without_work_there_is_no_turn() -> None:
    assert plan_turn(tiered(view_of([R("a", 50, 1.0)])), is_batch, 0.5, 2048) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("tiers=batch", "'batch' is no floor"),
        ("tiers=batch=1.5", "'batch=1.5' is no floor"),
        ("tiers=a=0.5,tenants=b=0.5", "the floors add up to 1"),
        ("turn_tokens=0", "turn_tokens must be at least 1"),
    ],
)
def test_wrong_floors_are_named(options: str, message: str) -> None:
    with pytest.raises(PolicySpecError, match=message):
        make_policy(f"fcfs+floors:{options}")
