"""What a trace says of its requests reaches the policies, on the fast path and off it."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
from factories import make_model

from slosched.core import SLO, Limits, OnInfeasible, Request, RequestStatus
from slosched.policy.spec import heeded_fields, make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Adapters, Priorities, PriorityShare, Trace, synthesize

LIMITS = Limits(max_num_batched_tokens=4096, max_num_seqs=8)
PLAIN = synthesize("azure_conv", num_requests=60, rate=12.0, seed=2).clipped(2000, 60).trace
PLAIN = PLAIN.with_slo(SLO(1.0, 0.05))
MARKED = PLAIN.with_priorities(Priorities((PriorityShare(0.3, -1), PriorityShare(0.2, 20)), 1))
ADAPTED = MARKED.with_adapters(Adapters(6, 1.0, 1))


def played(trace: Trace, spec: str, max_loras: int | None = None, *, by_steps: bool = False):
    limits = Limits(LIMITS.max_num_batched_tokens, LIMITS.max_num_seqs, max_loras=max_loras)
    config = SimulationConfig(limits, num_blocks=1200)
    on_step = (lambda record: None) if by_steps else None
    return simulate(trace, make_policy(spec), make_model(), config, on_step=on_step)


def outcomes(requests: list[Request]) -> list[tuple[object, ...]]:
    return [(r.request_id, r.end_reason, r.token_times_s, r.num_preemptions) for r in requests]


@pytest.mark.parametrize(
    "spec",
    [
        "vllm_v0:policy=priority",
        "vllm_v1:policy=priority",
        "sglang:enable_priority_scheduling=true",
        "trtllm:waiting_queue_policy=priority",
        "vtc:client=priority",
        "vtc:client=priority+past_future",
    ],
)
def test_an_option_that_heeds_priorities_matters_where_they_differ(spec: str) -> None:
    assert list(heeded_fields(make_policy(spec))) == ["priority"]
    marked = played(MARKED, spec)
    assert outcomes(marked) != outcomes(played(PLAIN, spec))
    assert outcomes(marked) == outcomes(played(MARKED, spec, by_steps=True))


@pytest.mark.parametrize("spec", ["vllm_v0", "vllm_v1", "sglang", "trtllm", "fcfs", "vtc", "edf"])
def test_priorities_matter_to_nobody_else(spec: str) -> None:
    assert not heeded_fields(make_policy(spec))
    assert outcomes(played(MARKED, spec)) == outcomes(played(PLAIN, spec))


@pytest.mark.parametrize("spec", ["vllm_v0", "vllm_v1", "sglang", "trtllm", "fcfs", "goodput"])
def test_a_limit_on_adapters_matters_where_there_are_more(spec: str) -> None:
    limited = played(ADAPTED, spec, max_loras=2)
    assert outcomes(limited) != outcomes(played(ADAPTED, spec))
    assert outcomes(limited) == outcomes(played(ADAPTED, spec, 2, by_steps=True))
    assert outcomes(played(ADAPTED, spec, max_loras=6)) == outcomes(played(ADAPTED, spec))


def test_clients_of_vtc_may_be_adapters() -> None:
    assert list(heeded_fields(make_policy("vtc:client=lora"))) == ["lora_id"]
    by_adapter = outcomes(played(ADAPTED, "vtc:client=lora"))
    assert by_adapter != outcomes(played(MARKED, "vtc:client=lora"))
    assert by_adapter == outcomes(played(ADAPTED, "vtc:client=lora", by_steps=True))


@pytest.mark.parametrize("num_seqs", [8, 64])
@pytest.mark.parametrize(
    "spec",
    [
        "goodput",
        "goodput+door",
        "goodput:fairness=1",
        "slo_aware",
        "edf:drop=infeasible",
        "fcfs:drop=expired",
        "sarathi:drop=infeasible",
        "qoserve:drop=infeasible",
        "slidebatching:drop=infeasible",
    ],
)
def test_what_takes_a_late_answer_is_never_turned_away_for_its_slo(
    spec: str, num_seqs: int
) -> None:
    choices = cycle(OnInfeasible)
    asking = [replace(r, on_infeasible=next(choices)) for r in PLAIN.scaled_to(200.0).requests]
    trace = Trace.of(asking, "asking")
    config = SimulationConfig(Limits(2048, num_seqs), num_blocks=600)
    requests = simulate(trace, make_policy(spec), make_model(), config)
    for request in requests:
        if request.on_infeasible is OnInfeasible.REJECT:
            assert request.status in (RequestStatus.FINISHED, RequestStatus.REJECTED)
        else:
            assert request.status is RequestStatus.FINISHED
    assert any(r.is_relegated for r in requests)
    by_steps = simulate(trace, make_policy(spec), make_model(), config, on_step=lambda _: None)
    assert outcomes(requests) == outcomes(by_steps)
