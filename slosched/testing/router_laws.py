"""The laws of routers and fleets, checked on random scenarios."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import EndReason, Policy, Request
from slosched.fleet.router import Router
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


def _played(
    scenario: Scenario, policy: Policy, router: Router, num_replicas: int, config: FleetConfig
) -> _Fates:
    """Play a scenario on a fleet, check that each request ends once, and return their fates."""
    ended: Counter[str] = Counter()

    def count(_row: object, requests: Sequence[Request]) -> None:
        ended.update(r.request_id for r in requests if r.end_reason is not EndReason.FAULT)

    replicas = [ReplicaKind(device_model(), scenario.config())] * num_replicas
    requests = simulate_fleet(scenario.trace(), policy, replicas, router, config, on_row=count)
    for request in requests:
        is_fault = request.end_reason is EndReason.FAULT
        require(request.status.is_ended, f"{request.request_id} has no end")
        require(not is_fault or bool(config.failures), "a request failed, and no replica did")
        num_ends = ended[request.request_id]
        require(num_ends == (not is_fault), f"{request.request_id} ended {num_ends} times")
    return [fate(request) for request in requests]


@st.composite
def _fleet_configs(draw: st.DrawFn) -> FleetConfig:
    """Draw how late the router's views are, and a failure of some of the replicas."""
    ticks = st.integers(0, 90).map(lambda n: n * TICK_S)
    failing = draw(st.sets(st.integers(0, 3), max_size=3))
    failures = [Failure(draw(ticks), index) for index in sorted(failing)]
    startup_s = draw(st.sampled_from((8 * TICK_S, 64 * TICK_S, float("inf"))))
    return FleetConfig(draw(st.just(0.0) | ticks), tuple(failures), startup_s)
