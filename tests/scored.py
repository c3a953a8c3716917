"""Simulated replays, of which only the score is of interest."""

from __future__ import annotations

from slosched.core import LatencyModel, Policy
from slosched.evaluate.capacity import Outcomes
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace


def num_good(policy: Policy, trace: Trace, model: LatencyModel, config: SimulationConfig) -> int:
    """Return how many requests of the trace the policy serves well, by the rule of `config`."""
    requests = simulate(trace, policy, model, config)
    return int(Outcomes.of(requests, config.limits.deadline_rule).good.sum())
