"""Tests that no way to share requests out among replicas exceeds the bound of a fleet."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
from every_schedule import SMALL, most_good, random_trace
from factories import make_model

from slosched.core import SLO, DeadlineRule, Limits
from slosched.evaluate.bounds import bounds_of, fleet_bounds
from slosched.fleet.routers import ROUTERS
from slosched.fleet.setup import FleetSetup
from slosched.fleet.simulate import FleetConfig
from slosched.fleet.split import SplitConfig
from slosched.fleet.split_setup import SplitSetup
from slosched.fleet.transfer import KVTransfer
from slosched.fleet.view import ReplicaKind
from slosched.metrics import RequestRecord, is_good
from slosched.perfmodel import FittedModel
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace, TraceRequest

LIMITS = Limits(max_num_batched_tokens=4, deadline_rule=DeadlineRule.ENVELOPE)
CONFIG = SimulationConfig(LIMITS)
SLOWER = make_model(0.9, 0.02, 0.05, 0.0, 0.1, 0.0, 0.5)
"""A device that takes about twice as long as `SMALL` for each step."""


def fleet_of(*models: FittedModel, config: SimulationConfig = CONFIG) -> FleetSetup:
    kinds = tuple(ReplicaKind(model, config) for model in models)
    return FleetSetup(kinds, ("a device",) * len(models), "round_robin", FleetConfig())


def most_good_of(trace: Trace, models: tuple[FittedModel, ...]) -> int:
    """Return the greatest number on time, over all ways to give each request to one replica."""

    @cache
    def most_alone(model: FittedModel, requests: tuple[TraceRequest, ...]) -> int:
        return most_good(Trace.of(list(requests), "its part"), model, 4) if requests else 0

    def shared_out(places: tuple[int, ...]) -> int:
        return sum(
            most_alone(
                model, tuple(r for r, p in zip(trace.requests, places, strict=True) if p == i)
            )
            for i, model in enumerate(models)
        )

    return max(map(shared_out, itertools.product(range(len(models)), repeat=len(trace))))


@pytest.mark.parametrize("models", [(SMALL, SMALL), (SMALL, SLOWER)], ids=["equal", "unequal"])
def test_no_schedule_of_two_replicas_beats_the_bound_and_some_reach_it(
    models: tuple[FittedModel, ...],
) -> None:
    num_binding = num_reached = 0
    for seed in range(10):
        trace = tight(random_trace(seed, most_requests=3, most_tokens=3))
        optimum = most_good_of(trace, models)
        bound = fleet_bounds(trace, fleet_of(*models)).tightest.num_good
        assert optimum <= bound, seed
        num_binding += bound < len(trace)
        num_reached += optimum == bound
    assert num_binding >= 2, "bounds that never bind test nothing"
    assert num_reached >= 3


def tight(trace: Trace) -> Trace:
    """Return the trace with shorter promises, so that two replicas cannot keep all of them."""
    return Trace(
        tuple(
            replace(r, arrival_s=r.arrival_s / 4, slo=SLO(r.slo.ttft_s / 2, r.slo.tpot_s))
            for r in trace.requests
        ),
        trace.name,
    )


@pytest.mark.parametrize("router", ROUTERS)
def test_no_router_beats_the_bound(router: str) -> None:
    fleet = replace(fleet_of(SMALL, SLOWER), router=router)
    for seed in range(3):
        trace = random_trace(seed, most_requests=30)
        bound = fleet_bounds(trace, fleet).tightest.num_good
        assert bound < len(trace), "a bound that does not bind tests nothing"
        for policy in ("fcfs", "goodput"):
            requests = fleet.simulate(trace, make_policy(policy), seed)
            records = [RequestRecord.from_request(request) for request in requests]
            assert sum(is_good(record, LIMITS.deadline_rule) for record in records) <= bound


def test_one_replica_has_the_bound_of_a_single_device() -> None:
    for seed in range(5):
        trace = random_trace(seed, most_requests=20)
        alone = bounds_of(trace, SMALL, CONFIG).each
        assert fleet_bounds(trace, fleet_of(SMALL)).each == alone


def test_a_device_that_is_too_slow_for_all_requests_adds_nothing() -> None:
    hopeless = make_model(99.0, 0.0, 0.0, 0.0, 0.0, 0.0, 99.0)
    for seed in range(5):
        trace = random_trace(seed, most_requests=20)
        one = fleet_bounds(trace, fleet_of(SMALL)).tightest.num_good
        assert fleet_bounds(trace, fleet_of(SMALL, hopeless)).tightest.num_good == one


def test_twice_the_replicas_serve_twice_the_burst() -> None:
    burst = [TraceRequest(f"r{i}", 0.0, 4, 1, SLO(4.0, 1.0)) for i in range(10)]
    trace = Trace.of(burst, "burst")
    one, two = (
        fleet_bounds(trace, fleet_of(*[SMALL] * number)).tightest.num_good for number in (1, 2)
    )
    assert 0 < one < 20
    assert 2 * one <= two <= 2 * one + 1


def test_pools_of_unequal_kinds_have_no_bound() -> None:
    kinds = fleet_of(SMALL, SLOWER).replicas
    trace = random_trace(1)
    unequal = SplitSetup(kinds, ("a", "b"), "round_robin", SplitConfig(1, KVTransfer(1.0)))
    assert "the pools are of several" in (fleet_bounds(trace, unequal).why_none_holds or "")
    equal = replace(unequal, replicas=(kinds[0], kinds[0]))
    assert fleet_bounds(trace, equal).why_none_holds is None
