"""A replay takes as long wherever it is called."""

from __future__ import annotations

import resource

import pytest

from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate
from slosched.workload import synthesize


@pytest.mark.parametrize("policy", ["fcfs", "goodput"])
def test_a_replay_at_any_depth_of_calls_hardly_asks_for_memory(policy: str) -> None:
    """Without room for its frames it takes 3,000 pages and more at the worst depth."""
    model, trace = (
        load_model("h100/llama-3.1-8b"),
        synthesize("azure_conv", num_requests=100, seed=1),
    )

    def num_pages(depth: int) -> int:
        if depth:
            return num_pages(depth - 1)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        simulate(trace, make_policy(policy), model)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    num_pages(0)  # what is made once
    most = max(num_pages(depth) for depth in range(0, 200, 4))
    assert most < 1000
