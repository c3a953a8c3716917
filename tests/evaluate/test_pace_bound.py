"""Tests that no policy serves a lasting load better than the pace of its decodes allows."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from factories import make_model

from slosched.core import SLO, DeadlineRule, Limits
from slosched.evaluate.bounds import Pace, demand_of, fluid_bound
from slosched.metrics import RequestRecord, is_good
from slosched.policy import POLICIES
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest

MODEL = make_model(0.05, 0.0, 0.005, 0.0, 0.0, 0.0, 0.4)
"""A model in which a step takes 0.4 s, plus 50 ms a token and 5 ms a token of decode context."""
LIMITS = Limits(max_num_batched_tokens=16, max_num_seqs=8)
TIMES = 6


def lasting(seed: int, num_requests: int = 6) -> Trace:
    rng = np.random.default_rng(seed)
    requests = [
        TraceRequest(
            f"r{i}",
            float(rng.uniform(0, 1) + i),
            int(rng.integers(1, 8)),
            int(rng.integers(1, 12)),
            SLO(float(rng.uniform(1, 6)), float(rng.uniform(0.5, 2))),
        )
        for i in range(num_requests)
    ]
    return Trace.of(requests, "lasting")


def repeated(trace: Trace, period_s: float) -> Trace:
    copies = [
        replace(r, request_id=f"{r.request_id}.{k}", arrival_s=r.arrival_s + k * period_s)
        for k in range(TIMES)
        for r in trace.requests
    ]
    return Trace.of(copies, "again and again")


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param(rule, marks=() if rule is DeadlineRule.MEAN_TPOT else pytest.mark.slow)
        for rule in DeadlineRule
    ],
)
def test_no_policy_keeps_up_more(rule: DeadlineRule) -> None:
    """Count the requests that are due before the last period ends, as the proof does."""
    limits = replace(LIMITS, deadline_rule=rule)
    num_binding = 0
    for seed in range(2):
        trace = lasting(seed)
        for rate in (0.7, 1.5):
            scaled = trace.scaled_to(rate)
            bound = Pace(trace, MODEL, limits).bound(rate)
            num_binding += bound.num_good < len(trace)
            whole = repeated(scaled, len(trace) / rate)
            end_s = scaled.requests[0].arrival_s + TIMES * len(trace) / rate
            due_s = {
                r.request_id: r.arrival_s + r.slo.ttft_s + r.num_output_tokens * r.slo.tpot_s
                for r in whole.requests
            }
            for policy in POLICIES.values():
                ended = simulate(whole, policy(), MODEL, SimulationConfig(limits))
                good = sum(
                    is_good(RequestRecord.from_request(r), rule)
                    for r in ended
                    if due_s[r.request_id] <= end_s
                )
                assert good <= TIMES * (bound.num_good + 1), (seed, rate, policy)
    assert num_binding >= 2, "a bound that never binds tests nothing"


def test_decodes_need_a_step_for_every_token() -> None:
    """Compare with the numbers of a hand calculation.

    A step takes 0.9 s and 0.5 ms a token; requests of 120 + 41 tokens come once a second.  Their 40
    later tokens are due within 1 + 40 * 0.92 s.  So there are 1.06 steps/s, each with 0.95 s of
    these tokens, and prompts and decodes take 0.08 s more.  L1 counts no steps and charges only the
    latter.
    """
    model = make_model(5e-4, 0.0, 0.0, 0.0, 0.0, 0.0, 0.9)
    limits = Limits(max_num_batched_tokens=512, max_num_seqs=64)
    steady = [TraceRequest(f"r{i}", float(i), 120, 41, SLO(1.0, 0.92)) for i in range(60)]
    trace = Trace.of(steady, "steady")
    assert fluid_bound(demand_of(trace, model, limits)).num_good == 60
    assert 0 < Pace(trace, model, limits).bound(1.0).num_good < 60
    assert Pace(trace, model, limits).bound(0.5).num_good == 60


def test_a_burst_is_seen_though_the_period_has_time_for_all() -> None:
    """Let 20 prompts of 0.45 s each come at once, with a TTFT of 3 s, and nothing for a minute."""
    prompts = [TraceRequest(f"r{i}", 0.0, 1, 1, SLO(3.0, 1.0)) for i in range(20)]
    trace = Trace.of([*prompts, TraceRequest("last", 60.0, 1, 1, SLO(3.0, 1.0))], "burst")
    model = make_model(0.45, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    assert fluid_bound(demand_of(trace, model, LIMITS)).num_good == 21
    assert 7 <= Pace(trace, model, LIMITS).bound(trace.rate).num_good <= 9


def test_years_between_two_requests_take_no_more_memory() -> None:
    requests = [TraceRequest(f"r{i}", 1e9 * i, 5, 5, SLO(4.0, 1.0)) for i in range(3)]
    requests.append(TraceRequest("hopeless", 1e9, 5, 5, SLO(0.1, 0.1)))
    trace = Trace.of(requests, "years")
    pace = Pace(trace, MODEL, LIMITS)
    assert pace.bound(trace.rate).num_good == 3
    assert pace.bound(100.0).num_good < 3


def test_the_capacity_is_where_the_bound_gives_way_for_good() -> None:
    pace = Pace(lasting(3, num_requests=40), MODEL, LIMITS)
    rate = pace.capacity(0.8)
    assert pace.bound(rate).num_good < 0.8 * 40 <= pace.bound(rate / 1.006).num_good
    assert pace.capacity(0.5) > rate
    good = [pace.bound(rate * factor).num_good for factor in (0.2, 0.5, 1.0, 1.3, 2.0, 5.0)]
    assert good == sorted(good, reverse=True)
    assert good[0] > good[-1]


def test_a_capacity_that_nothing_bounds_or_that_is_none() -> None:
    easy = Trace.of([TraceRequest(f"r{i}", i, 1, 1, SLO(math.inf, 1.0)) for i in range(3)], "easy")
    assert Pace(easy, MODEL, LIMITS).capacity(0.9) > 0
    hard = Trace.of([TraceRequest(f"r{i}", i, 5, 5, SLO(0.1, 0.1)) for i in range(3)], "hard")
    assert Pace(hard, MODEL, LIMITS).capacity(0.9) == 0
    with pytest.raises(ValueError, match="share"):
        Pace(easy, MODEL, LIMITS).capacity(1.5)
    at_once = Trace.of([TraceRequest(f"r{i}", 0.0, 1, 1, SLO(1, 1)) for i in range(3)], "at once")
    with pytest.raises(ValueError, match="one instant"):
        Pace(at_once, MODEL, LIMITS)
