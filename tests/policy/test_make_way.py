"""Requests that can wait give up KV blocks and seats to requests that are due soon."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import pytest
from views import R, decode, view_of

from slosched.batch import BatchBuilder
from slosched.core import (
    NO_SLO,
    SLO,
    DeadlineRule,
    Limits,
    OnInfeasible,
    PreemptionMode,
    Request,
    RequestStatus,
    fan_out,
)
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.metrics import RequestRecord, is_good
from slosched.perfmodel import load_model
from slosched.policy.kit import come_back, make_way
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import (
    SimulatedReplica,
    SimulationConfig,
    make_requests,
    output_lengths,
)
from slosched.workload import Proportional, synthesize

L40S = load_model("l40s/llama-3.1-8b")
KV_TOKENS = kv_capacity_tokens(L40S) // 16 * 16
AT_ONCE = SLO(0.001, 0.05)
REJECT, SERVE, RELEGATE = OnInfeasible.REJECT, OnInfeasible.SERVE, OnInfeasible.RELEGATE


def preempted_for(
    prompts: Sequence[Request], running: Sequence[Request], **limits: int
) -> set[str]:
    """Return what makes way in a cache of 1,000 blocks of one token."""
    view = view_of([*prompts, *running], num_blocks=1000, limits=Limits(**limits))
    batch = BatchBuilder(view)
    assert make_way(batch, view, list(prompts)) == bool(batch.preempted)
    return set(batch.preempted)


def best_effort(name: str, tokens: int) -> Request:
    request = decode(name, tokens, slack_ms=50)
    request.slo, request.deadline_s = NO_SLO, math.inf
    return request


def test_best_effort_makes_way_the_youngest_first_and_no_more_than_is_needed() -> None:
    old, young, kept = best_effort("old", 300), best_effort("young", 300), decode("kept", 390, 50)
    assert preempted_for([R("p", 250, due_s=1.0).request()], [kept, old, young]) == {"young"}
    assert preempted_for([R("p", 500, due_s=1.0).request()], [kept, old, young]) == {"old", "young"}


def test_nothing_makes_way_in_vain() -> None:
    running = [decode("kept", 600, slack_ms=50), best_effort("other", 300)]
    assert not preempted_for([R("p", 500, due_s=1.0).request()], running)


def test_nothing_makes_way_for_what_is_late_already() -> None:
    """Others may start before it, and be preempted for it in the next step, and so on."""
    late, due = (R(name, 500, due_s=s).request() for name, s in (("late", -0.1), ("due", 0.1)))
    running = [best_effort("other", 600)]
    assert not preempted_for([late], running)
    assert preempted_for([late, due], running) == {"other"}


def test_nothing_makes_way_for_best_effort() -> None:
    waiting = R("p", 500, due_s=1.0).request()
    waiting.slo = NO_SLO
    assert not preempted_for([waiting], [best_effort("other", 900)])


@pytest.mark.parametrize(("due_s", "makes_way"), [(3.0, False), (59.0, False), (61.0, True)])
def test_one_that_is_due_in_more_than_a_minute_makes_way(due_s: float, makes_way: bool) -> None:
    soon, later = R("soon", 500, 0.01).request(), R("later", 500, due_s, done=400).request()
    found = preempted_for([soon, later], [decode("kept", 400, slack_ms=50)])
    assert found == ({"later"} if makes_way else set())


def test_a_seat_is_given_up_as_well() -> None:
    running = [best_effort("a", 10), decode("b", 10, slack_ms=50)]
    assert preempted_for([R("p", 10, due_s=1.0).request()], running, max_num_seqs=2) == {"a"}


def test_without_a_latency_model_only_best_effort_makes_way() -> None:
    prompt = R("p", 500, due_s=1.0).request()
    for patient, makes_way in ((best_effort("o", 600), True), (decode("o", 600, 70_000), False)):
        view = view_of([prompt, patient], num_blocks=1000, model=None)
        output = make_policy("edf").schedule(view)
        assert output.preempted == (("o",) if makes_way else ())
        assert ("p" in output.num_scheduled_tokens) == makes_way


@pytest.mark.parametrize(
    ("num_preemptions", "tokens", "num_free", "comes_back"),
    [
        (0, 300, 300, True),
        (1, 300, 599, False),
        (1, 300, 600, True),
        (5, 300, 749, False),
        (5, 300, 750, True),
        (5, 900, 750, False),
        (5, 900, 900, True),
    ],
)
def test_best_effort_comes_back_where_there_is_more_room_than_it_needs(
    num_preemptions: int, tokens: int, num_free: int, comes_back: bool
) -> None:
    waiting, promised = (
        R("waiting", tokens, due_s=1.0).request(),
        R("promised", 300, due_s=1.0).request(),
    )
    waiting.slo, waiting.deadline_s = NO_SLO, math.inf
    waiting.num_preemptions = promised.num_preemptions = num_preemptions
    kept = decode("kept", 1001 - num_free, 50)
    view = view_of([waiting, promised, kept], num_blocks=1000)
    assert view.kv.num_free_blocks == num_free
    assert come_back(view.waiting, view.kv) == [waiting, promised][1 - comes_back :]


@pytest.mark.parametrize(("num_preemptions", "starts"), [(0, True), (1, False)])
def test_goodput_begins_best_effort_again_only_where_it_has_room(
    num_preemptions: int, starts: bool
) -> None:
    waiting = R("waiting", 300, due_s=1.0).request()
    waiting.slo, waiting.deadline_s = NO_SLO, math.inf
    waiting.num_preemptions = num_preemptions
    view = view_of([waiting, decode("kept", 501, 50)], num_blocks=1000, model=L40S)
    planned = make_policy("goodput").schedule(view).num_scheduled_tokens
    assert ("waiting" in planned) == starts


def share_good(
    rate: float,
    odd: Request | None,
    policy: str = "goodput+door",
    preemption: PreemptionMode = PreemptionMode.RECOMPUTE,
) -> float:
    """Return which share of 60 conversations on an L40S are good beside an odd request."""
    trace = synthesize("azure_conv", num_requests=60, rate=rate, seed=7)
    trace = trace.with_slo(Proportional(L40S.predict_prefill, 2.0, 0.05, 1.0))
    requests = make_requests(trace, KV_TOKENS)
    lengths = output_lengths(trace, requests)
    num_blocks = KV_TOKENS // 16
    limits = Limits(preemption_mode=preemption)
    config = SimulationConfig(limits, num_blocks, num_host_blocks=num_blocks)
    every = list(requests)
    if odd is not None:
        every.append(odd)
        members = [odd] if odd.group is None else odd.group.members
        lengths |= {member.request_id: member.max_tokens for member in members}
    replica = SimulatedReplica(make_policy(policy), L40S, config, lengths)
    for request in sorted(every, key=lambda r: r.arrival_s):
        replica.add(request)
    replica.run()
    assert odd is None or odd.status.is_ended
    records = map(RequestRecord.from_request, requests)
    return sum(is_good(each, DeadlineRule.MEAN_TPOT) for each in records) / len(requests)


@cache
def share_good_without(
    rate: float,
    policy: str = "goodput+door",
    preemption: PreemptionMode = PreemptionMode.RECOMPUTE,
) -> float:
    return share_good(rate, None, policy, preemption)


@pytest.mark.parametrize("rate", [0.7, 3.0])
@pytest.mark.parametrize(
    ("slo", "on_infeasible"),
    [(AT_ONCE, SERVE), (AT_ONCE, RELEGATE), (NO_SLO, SERVE), (SLO(1e9, 1e9), SERVE)],
)
def test_a_prompt_as_long_as_the_kv_cache_costs_others_at_most_one_percent(
    rate: float, slo: SLO, on_infeasible: OnInfeasible
) -> None:
    """It arrives early, and is in the way until it is done."""
    odd = Request("odd", 5.0, KV_TOKENS - 16, 5, slo, on_infeasible=on_infeasible)
    assert share_good(rate, odd) >= share_good_without(rate) - 0.01


def test_an_answer_many_times_over_leaves_its_seats_to_others() -> None:
    odd = Request("odd", 5.0, 500, 2000, NO_SLO)
    fan_out(odd, 250)
    assert share_good(3.0, odd) >= share_good_without(3.0) - 0.01


@pytest.mark.parametrize(
    ("num_answers", "tpot_s", "on_infeasible"),
    [(64, 0.05, REJECT), (128, 0.05, REJECT), (128, 0.05, SERVE), (120, 0.07, REJECT)],
)
def test_many_answers_at_once_cost_others_at_most_one_percent(
    num_answers: int, tpot_s: float, on_infeasible: OnInfeasible
) -> None:
    """Alone on the device all answers would be in time, or, if 128, hardly not."""
    odd = Request("odd", 5.0, 500, 500, SLO(1.0, tpot_s), on_infeasible=on_infeasible)
    fan_out(odd, num_answers)
    assert share_good(2.0, odd) >= share_good_without(2.0) - 0.01
    assert (odd.status is RequestStatus.REJECTED) == (num_answers > 64 and on_infeasible is REJECT)


BY_DEADLINE = ("edf:drop=expired", "edf:drop=infeasible+door", "slo_aware")


@pytest.mark.parametrize("policy", BY_DEADLINE)
@pytest.mark.parametrize(
    ("slo", "on_infeasible"),
    [(AT_ONCE, RELEGATE), (SLO(1e9, 1e9), SERVE)],
)
def test_so_it_does_under_other_policies_that_serve_by_deadline(
    policy: str, slo: SLO, on_infeasible: OnInfeasible
) -> None:
    odd = Request("odd", 5.0, KV_TOKENS - 16, 5, slo, on_infeasible=on_infeasible)
    assert share_good(0.7, odd, policy) >= share_good_without(0.7, policy) - 0.01


@pytest.mark.parametrize("policy", ["goodput+door", *BY_DEADLINE])
def test_what_makes_way_is_not_swapped_out_and_back_before_any_prompt(policy: str) -> None:
    odd = Request("odd", 5.0, KV_TOKENS - 16, 5, NO_SLO)
    swap = PreemptionMode.SWAP
    assert share_good(0.7, odd, policy, swap) >= share_good_without(0.7, policy, swap) - 0.01
