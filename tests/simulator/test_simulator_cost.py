"""The simulator is fast, even when thousands of requests wait."""

from __future__ import annotations

import time

import pytest
from machine import is_below

from slosched.core import SLO, Limits
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import synthesize

pytestmark = pytest.mark.cost

MODEL = load_model("h100/llama-3.1-8b")
CONFIG = SimulationConfig(Limits(), num_blocks=25_000)
NEAR_SATURATION = 20.0


def cpu_s(policy: str, num_requests: int, rate: float) -> float:
    slo = SLO(ttft_s=1.0, tpot_s=0.05)
    trace = synthesize("azure_conv", num_requests=num_requests, rate=rate, seed=1, slo=slo)
    start_s = time.process_time()
    requests = simulate(trace, make_policy(policy), MODEL, CONFIG)
    assert all(request.status.is_ended for request in requests)
    return time.process_time() - start_s


@pytest.mark.parametrize("policy", ["fcfs", "sarathi", "edf", "sjf", "slo_aware", "goodput"])
def test_a_thousand_requests_near_saturation_take_less_than_half_a_second(policy: str) -> None:
    """At this speed 19,366 requests take less than 10 s; a first replay warms the caches up."""
    cpu_s(policy, 50, NEAR_SATURATION)
    assert is_below(0.5, lambda: cpu_s(policy, 1000, NEAR_SATURATION))


@pytest.mark.parametrize("policy", ["fcfs", "sarathi"])
def test_a_long_queue_costs_nothing(policy: str) -> None:
    """Nearly all requests wait from the first second on.

    If each waiting request had a cost, the time would grow 16-fold.
    """
    cpu_s(policy, 50, NEAR_SATURATION)
    assert any(cpu_s(policy, 4000, 1000.0) < 8 * cpu_s(policy, 1000, 1000.0) for _ in range(3))
