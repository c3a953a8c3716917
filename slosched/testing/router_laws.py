"""The laws of routers, scalers and fleets, checked on random scenarios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import EndReason, Policy, Request
from slosched.fleet.router import Router
from slosched.fleet.routers.round_robin import RoundRobin
from slosched.fleet.scaling import Lease, Scaling
from slosched.fleet.simulate import Failure, FleetConfig, simulate_fleet
from slosched.fleet.view import ReplicaKind
from slosched.testing.laws import fate
from slosched.testing.plans import require
from slosched.testing.random_scenarios import scenarios, search
from slosched.testing.scenario import TICK_S, Scenario, device_model

_Fates = list[tuple[object, ...]]


def check_router(
    make_router: Callable[[], Router],
    make_policy: Callable[[], Policy],
    *,
    max_examples: int = 50,
    seed: int = 0,
    shrink: bool = True,
) -> None:
    """Raise if a router, with `make_policy` in the engines, breaks a law on a random fleet.

    The laws are: every request ends exactly once, on one replica; two runs are equal to the bit;
    and one replica behind the router is equal to the bit to the same replica without a router.
    Without `shrink`, the error is that of the first fleet on which a law broke.
    """

    @search(max_examples, shrink=shrink)
    @given(scenarios(), st.integers(1, 4), _fleet_configs())
    def laws_hold(scenario: Scenario, num_replicas: int, config: FleetConfig) -> None:
        def play(num: int, config: FleetConfig) -> _Fates:
            return _played(scenario, make_policy(), make_router(), num, config)

        alone = [fate(request) for request in scenario.simulated(make_policy())]
        behind = play(1, FleetConfig(delay_s=config.delay_s))
        require(behind == alone, "a router changed what one replica does")
        failures = tuple(f for f in config.failures if f.index < num_replicas)
        config = FleetConfig(config.delay_s, failures, config.startup_s)
        first, second = play(num_replicas, config), play(num_replicas, config)
        require(first == second, "the same fleet served the same requests in two ways")

    hypothesis.seed(seed)(laws_hold)()


def check_scaler(
    scaler: str,
    make_policy: Callable[[], Policy],
    *,
    max_examples: int = 50,
    seed: int = 0,
    shrink: bool = True,
) -> None:
    """Raise if a fleet that `scaler` scales, as `make_scaler` reads it, breaks a law.

    The laws are those of `check_router` for each request, so that none is lost as replicas come and
    go.  Besides, replicas never hold a place twice, and a fleet whose fewest replicas are its most
    is equal to the bit to one without a scaler.
    """

    @search(max_examples, shrink=shrink)
    @given(scenarios(), st.integers(1, 4), st.integers(1, 4), _fleet_configs())
    def laws_hold(scenario: Scenario, least: int, more: int, config: FleetConfig) -> None:
        config = replace(config, startup_s=4 * TICK_S)
        most = least + more - 1
        failures = tuple(f for f in config.failures if f.index < most)
        scaled = replace(config, failures=failures)

        def play(least: int, config: FleetConfig, scaling: Scaling | None) -> _Fates:
            return _played(scenario, make_policy(), RoundRobin(), least, config, scaling)

        first, second = (play(most, scaled, Scaling(scaler, least)) for _ in range(2))
        require(first == second, "the same scaled fleet served the same requests in two ways")
        unbroken = replace(config, failures=())
        alike = play(least, unbroken, Scaling(scaler, least))
        require(alike == play(least, unbroken, None), "a scaler changed what a fixed fleet does")

    hypothesis.seed(seed)(laws_hold)()


def _played(
    scenario: Scenario,
    policy: Policy,
    router: Router,
    num_replicas: int,
    config: FleetConfig,
    scaling: Scaling | None = None,
) -> _Fates:
    """Play a scenario on a fleet, check that each request ends once, and return their fates."""
    ended: Counter[str] = Counter()

    def count(_row: object, requests: Sequence[Request]) -> None:
        ended.update(r.request_id for r in requests if r.end_reason is not EndReason.FAULT)

    replicas = [ReplicaKind(device_model(), scenario.config())] * num_replicas
    leases: list[Lease] = []
    requests = simulate_fleet(
        scenario.trace(),
        policy,
        replicas,
        router,
        config,
        scaling=scaling,
        on_row=count,
        on_lease=leases.append,
    )
    _check_leases(leases, max(request.end_s or 0.0 for request in requests))
    for request in requests:
        is_fault = request.end_reason is EndReason.FAULT
        require(request.status.is_ended, f"{request.request_id} has no end")
        require(not is_fault or bool(config.failures), "a request failed, and no replica did")
        num_ends = ended[request.request_id]
        require(num_ends == (not is_fault), f"{request.request_id} ended {num_ends} times")
    return [fate(request) for request in requests]


def _check_leases(leases: Sequence[Lease], end_s: float) -> None:
    """Raise if two replicas held one place at a time, or one ended before it was closed."""
    for lease in leases:
        require(lease.until_s is not None, f"replica {lease.index} never ended")
        until_s = lease.until_s or 0.0
        closed_s = end_s if lease.closed_s is None else min(lease.closed_s, end_s)
        require(lease.from_s <= closed_s <= until_s <= end_s, "a replica ended before its begin")
    for lease, other in combinations(leases, 2):
        apart = (lease.until_s or 0.0) <= other.from_s or (other.until_s or 0.0) <= lease.from_s
        require(lease.index != other.index or apart, f"two replicas held place {lease.index}")


@st.composite
def _fleet_configs(draw: st.DrawFn) -> FleetConfig:
    """Draw how late the router's views are, and a failure of some of the replicas."""
    ticks = st.integers(0, 90).map(lambda n: n * TICK_S)
    failing = draw(st.sets(st.integers(0, 3), max_size=3))
    failures = [Failure(draw(ticks), index) for index in sorted(failing)]
    startup_s = draw(st.sampled_from((8 * TICK_S, 64 * TICK_S, float("inf"))))
    return FleetConfig(draw(st.just(0.0) | ticks), tuple(failures), startup_s)
