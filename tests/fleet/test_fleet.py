"""Replicas in one virtual time: what routers see, unequal replicas, and failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fleets import A_SECOND_A_STEP, TWO_SECONDS_A_STEP, Noting, make_replicas, make_trace

from slosched.core import EndReason, Request, RequestStatus
from slosched.fleet.router import R, Router
from slosched.fleet.routers import ROUTERS
from slosched.fleet.routers.least_requests import LeastRequests
from slosched.fleet.routers.round_robin import RoundRobin
from slosched.fleet.simulate import Failure, FleetConfig, simulate_fleet
from slosched.fleet.view import ReplicaKind
from slosched.metrics import RequestRecord
from slosched.policy import FCFS
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.testing.plans import LawBrokenError
from slosched.testing.router_laws import check_router


def ends(requests: Sequence[Request]) -> list[float | None]:
    return [request.end_s for request in requests]


def test_each_replica_serves_only_what_it_was_sent() -> None:
    trace = make_trace((0.0, 8, 3), (0.0, 8, 2), (0.5, 8, 2))
    requests = simulate_fleet(trace, FCFS(), make_replicas(2), RoundRobin())
    # Request 2 waits for the step of request 0 that ends at 1.
    assert ends(requests) == [3.0, 2.0, 3.0]


def test_a_replica_is_as_fast_as_its_own_model() -> None:
    trace = make_trace((0.0, 8, 3), (0.0, 8, 3))
    fleet = [*make_replicas(1), *make_replicas(1, TWO_SECONDS_A_STEP)]
    assert ends(simulate_fleet(trace, FCFS(), fleet, RoundRobin())) == [3.0, 6.0]


def test_a_router_does_not_see_the_end_of_a_step_that_still_runs() -> None:
    trace = make_trace((0.0, 8, 1), (0.5, 8, 1), (1.0, 8, 1), (2.25, 8, 1))
    router = Noting(plan=[0, 1, 1, 0])
    simulate_fleet(trace, FCFS(), make_replicas(2), router)
    assert router.seen == [[0, 0], [1, 0], [0, 1], [0, 1]]


def test_a_late_view_shows_neither_what_was_sent_nor_what_has_ended_since() -> None:
    trace = make_trace((0.0, 8, 1), (0.5, 8, 1), (1.0, 8, 1), (1.8, 8, 1), (2.5, 8, 1))
    router = Noting()
    simulate_fleet(trace, FCFS(), make_replicas(1), router, FleetConfig(delay_s=0.75))
    # At 1.8 it sees 1.05: the first has ended at 1, and the second and third have come.
    # At 2.5 it sees 1.75: the second ends at 2, and the fourth came at 1.8.
    assert router.seen == [[0], [0], [1], [2], [2]]


def test_a_request_goes_only_to_replicas_whose_kv_cache_can_hold_it() -> None:
    trace = make_trace((0.0, 100, 1), (0.0, 100, 1), (0.0, 8, 1))
    fleet = [*make_replicas(1, kv_tokens=64), *make_replicas(1)]
    requests = simulate_fleet(trace, FCFS(), fleet, LeastRequests())
    assert [request.end_reason for request in requests] == [EndReason.STOP] * 3


def test_requests_that_have_not_begun_to_answer_go_elsewhere_when_a_replica_fails() -> None:
    trace = make_trace((0.0, 8, 5), (1.5, 8, 2), (1.6, 8, 2))
    config = FleetConfig(failures=(Failure(1.75, 0),))
    requests = simulate_fleet(trace, FCFS(), make_replicas(2), Noting(plan=[0, 0, 1, 1]), config)
    first, second, third = requests
    assert (first.status, first.end_reason, first.end_s) == (
        RequestStatus.ABORTED,
        EndReason.FAULT,
        1.75,
    )
    assert first.token_times_s == [1.0]
    assert second.end_reason is EndReason.STOP
    # It comes to replica 1 during the step that began at 1.6.
    assert second.token_times_s == pytest.approx([3.6, 4.6])
    assert third.token_times_s == pytest.approx([2.6, 3.6])


def test_a_replica_that_failed_comes_back_after_its_start_up_time() -> None:
    trace = make_trace((0.0, 8, 1), (2.0, 8, 1), (4.0, 8, 1))
    config = FleetConfig(failures=(Failure(1.5, 0),), startup_s=2.0)
    requests = simulate_fleet(trace, FCFS(), make_replicas(1), RoundRobin(), config)
    assert [request.end_reason for request in requests] == [
        EndReason.STOP,
        EndReason.FAULT,
        EndReason.STOP,
    ]
    assert ends(requests) == [1.0, 2.0, 5.0]


def test_a_failure_after_the_last_arrival_counts() -> None:
    config = FleetConfig(failures=(Failure(2.5, 0),))
    (request,) = simulate_fleet(
        make_trace((0.0, 8, 9)), FCFS(), make_replicas(1), RoundRobin(), config
    )
    assert (request.end_reason, request.end_s) == (EndReason.FAULT, 2.5)
    assert request.token_times_s == [1.0, 2.0]


@pytest.mark.parametrize(
    ("failures", "startup_s", "message"),
    [
        ((Failure(1.0, 2),), 1.0, "replicas 0 to 1"),
        ((Failure(-1.0, 0),), 1.0, "time begins at 0"),
        ((Failure(1.0, 0), Failure(2.0, 0)), 5.0, "is back at 6 s"),
    ],
)
def test_a_failure_that_cannot_be_is_refused(
    failures: tuple[Failure, ...], startup_s: float, message: str
) -> None:
    config = FleetConfig(failures=failures, startup_s=startup_s)
    with pytest.raises(ValueError, match=message):
        simulate_fleet(make_trace((0.0, 8, 1)), FCFS(), make_replicas(2), RoundRobin(), config)


@pytest.mark.parametrize("values", [{"delay_s": -1.0}, {"delay_s": math.inf}, {"startup_s": 0.0}])
def test_a_fleet_of_impossible_times_is_refused(values: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        FleetConfig(**values)


def test_a_fleet_without_replicas_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        simulate_fleet(make_trace((0.0, 8, 1)), FCFS(), [], RoundRobin())


def test_a_client_that_leaves_is_counted_at_the_time_it_left() -> None:
    trace = make_trace((0.0, 8, 9), (2.75, 8, 1), (3.25, 8, 1))
    config = SimulationConfig(client_timeout_s=3.0)
    router = Noting()
    (first, *_) = simulate_fleet(trace, FCFS(), [ReplicaKind(A_SECOND_A_STEP, config)], router)
    assert (first.end_reason, first.end_s) == (EndReason.CLIENT, 3.0)
    assert router.seen == [[0], [1], [1]]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("overlap", [False, True])
def test_one_replica_is_the_plain_simulator_with_all_that_a_server_adds(
    router: str, overlap: bool
) -> None:
    lines = [(0.37 * i, 8 + 5 * (i % 7), 1 + i % 9) for i in range(40)]
    config = SimulationConfig(
        num_blocks=40, overlap=overlap, per_request_s=0.3, schedule_s=0.05, client_timeout_s=9.0
    )
    plain = simulate(make_trace(*lines), FCFS(), A_SECOND_A_STEP, config)
    replica = ReplicaKind(A_SECOND_A_STEP, config)
    behind = simulate_fleet(make_trace(*lines), FCFS(), [replica], ROUTERS[router]())
    assert list(map(RequestRecord.from_request, behind)) == list(
        map(RequestRecord.from_request, plain)
    )


def test_replicas_draw_their_disturbances_from_seeds_of_their_own() -> None:
    trace = make_trace((0.0, 8, 4), (0.0, 8, 4))
    config = SimulationConfig()
    noisy = replace(config, disturbances=replace(config.disturbances, noise=0.2))
    fleet = [ReplicaKind(A_SECOND_A_STEP, noisy)] * 2
    first, second = simulate_fleet(trace, FCFS(), fleet, RoundRobin(), seed=3)
    config = replace(noisy, seed=3)
    (alone,) = simulate(make_trace((0.0, 8, 4)), FCFS(), A_SECOND_A_STEP, config)
    assert first.token_times_s == alone.token_times_s
    assert first.token_times_s != second.token_times_s


class SendsTwice(Router):
    """A router that breaks a law: it serves every request on two replicas."""

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        replicas[-1].send(request)
        return replicas[0]


def test_the_laws_catch_a_router_that_serves_a_request_twice() -> None:
    with pytest.raises((LawBrokenError, ValueError)):
        check_router(SendsTwice, FCFS, max_examples=5, shrink=False)
