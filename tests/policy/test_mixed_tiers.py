"""`goodput` in overload, where a third of the requests each ask for 25, 50 and 100 ms a token."""

from __future__ import annotations

from collections.abc import Mapping

from slosched.core import DeadlineRule
from slosched.evaluate.capacity import Outcomes
from slosched.evaluate.judge.promises import PROMISES
from slosched.perfmodel import load_model
from slosched.policy.goodput import Goodput
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import synthesize


def attainment(device: str, rate: float, num_requests: int) -> Mapping[float, float]:
    """Return the share of the requests in time, by TPOT; that of all is under 0."""
    model = load_model(device)
    num_blocks = int(model.provenance["kv_capacity_tokens"]) // 16
    trace = synthesize("azure_conv", num_requests=num_requests, rate=rate, seed=1)
    trace = trace.with_slo(PROMISES["mixed"](model, 1))
    config = SimulationConfig(num_blocks=num_blocks, online=True)
    outcomes = Outcomes.of(simulate(trace, Goodput(), model, config), DeadlineRule.MEAN_TPOT)
    good: dict[float, list[bool]] = {0.0: []}
    for request, is_good in zip(trace.requests, outcomes.requests["good"], strict=True):
        good[0.0].append(is_good)
        good.setdefault(request.slo.tpot_s, []).append(is_good)
    return {tpot_s: sum(each) / len(each) for tpot_s, each in good.items()}


def test_a_tpot_that_fewer_decodes_would_keep_is_kept_in_overload() -> None:
    """It was given up as soon as there were too many decodes: 15 % of its requests were in time,
    and 54 % of all."""
    found = attainment("a100/llama-3.1-8b", rate=18, num_requests=400)
    assert found[0.025] > 0.6
    assert found[0.0] > 0.62


def test_who_asks_for_a_tpot_that_is_not_kept_takes_nothing_from_others() -> None:
    """No step on an L40S has time for more than a decode or two in 25 ms."""
    found = attainment("l40s/llama-3.1-8b", rate=7, num_requests=300)
    assert found[0.025] < 0.05
    assert found[0.050] > 0.99
    assert found[0.100] > 0.99
