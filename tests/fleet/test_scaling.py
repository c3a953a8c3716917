"""Fleets whose number of replicas changes: start-up, drain, decisions, and what they cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product

import pytest
from fleets import Noting, make_replicas, make_trace

from slosched.core import SLO, DeadlineRule, EndReason, Limits, Request
from slosched.fleet import scalers
from slosched.fleet.roster import Roster
from slosched.fleet.router import Router
from slosched.fleet.routers.least_requests import LeastRequests
from slosched.fleet.routers.round_robin import RoundRobin
from slosched.fleet.scaler import FleetState, Scaler, scaled_by_ratio
from slosched.fleet.scalers import SCALERS
from slosched.fleet.scaling import Lease, Scaling
from slosched.fleet.simulate import Failure, FleetConfig, simulate_fleet
from slosched.fleet.spec import ScalerSpecError, make_scaler
from slosched.fleet.steady import MeanRequest, sustained_rate
from slosched.fleet.view import ReplicaKind, ReplicaView
from slosched.metrics import records_of, summarize
from slosched.perfmodel import LinearCoefficients, LinearModel, load_model
from slosched.policy import FCFS
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.testing import LawBrokenError
from slosched.testing.router_laws import check_scaler
from slosched.workload import Trace, synthesize

CONFIG = FleetConfig(startup_s=2.0)
PLAN: list[int] = []
"""The numbers that `Planned` wants, one after the other."""


@dataclass
class Planned(Scaler):
    """Wants the numbers of PLAN; in the end it stays with the last of them."""

    every_s: float = 1.0
    hold_s: float = 0.0

    def reset(self) -> None:
        self.left = list(PLAN)

    def num_wanted(self, state: FleetState) -> int:
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


@dataclass
class Flapping(Scaler):
    """Wants all replicas and the fewest in turn, so that many are closed while they serve."""

    every_s: float = 0.004
    hold_s: float = 0.0

    def reset(self) -> None:
        self.wants_all = False

    def num_wanted(self, state: FleetState) -> int:
        self.wants_all = not self.wants_all
        return 9 if self.wants_all else 0


@pytest.fixture
def flapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register `Flapping`."""
    monkeypatch.setitem(scalers.SCALERS, "flapping", Flapping)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Register `Planned`, and return the plan that a test may fill."""
    monkeypatch.setitem(scalers.SCALERS, "planned", Planned)
    PLAN.clear()
    return PLAN


def play(
    trace: Trace,
    router: Router,
    most: int,
    scaling: Scaling | None,
    config: FleetConfig = CONFIG,
) -> tuple[list[Request], list[Lease]]:
    leases: list[Lease] = []
    replicas = make_replicas(most)
    requests = simulate_fleet(
        trace, FCFS(), replicas, router, config, scaling=scaling, on_lease=leases.append
    )
    return requests, leases


def spans(leases: Sequence[Lease]) -> list[tuple[int, float, float, float | None, float | None]]:
    return [(e.index, e.from_s, e.ready_s, e.closed_s, e.until_s) for e in leases]


def test_a_new_replica_takes_requests_after_its_start_up(planned: list[int]) -> None:
    planned += [2]
    router = Noting()
    trace = make_trace(*[(0.5 * i, 8, 1) for i in range(8)])
    _, leases = play(trace, router, 2, Scaling("planned", 1))
    # Wanted at 1, ready at 3: it is there for the arrivals at 3 and 3.5, which end the trace.
    assert [len(seen) for seen in router.seen] == [1, 1, 1, 1, 1, 1, 2, 2]
    assert [(lease.from_s, lease.ready_s) for lease in leases] == [(0, 0), (1, 3)]


def test_a_closed_replica_serves_what_it_has_gets_no_more_and_is_paid_for_until_then(
    planned: list[int],
) -> None:
    planned += [2, 2, 2, 1]
    # Replica 1 is wanted at 1, ready at 3 and gets a request of 5 s at 3.5.  It is closed at 4, as
    # it has fewer requests than replica 0, and drains until 8.5.
    router = Noting(plan=[0, 0, 1, 0])
    trace = make_trace((0, 8, 9), (0.5, 8, 9), (3.5, 8, 5), (4.5, 8, 7))
    requests, leases = play(trace, router, 2, Scaling("planned", 1))
    assert all(request.end_reason is EndReason.STOP for request in requests)
    assert [len(seen) for seen in router.seen] == [1, 1, 2, 1]
    assert requests[2].end_s == 8.5
    assert spans(leases) == [(0, 0, 0, None, 12), (1, 1, 3, 4, 8.5)]
    assert sum(lease.gpu_s for lease in leases) == 12 + 7.5


def test_a_replica_that_fails_once_it_is_drained_is_paid_for_until_the_drain(
    planned: list[int],
) -> None:
    planned += [2, 2, 2, 1]
    # As above; the drain ends at 8.5, and the next decision would be at 9.
    config = replace(CONFIG, failures=(Failure(8.75, 1),))
    trace = make_trace((0, 8, 9), (0.5, 8, 9), (3.5, 8, 5), (4.5, 8, 7), (9.5, 8, 1))
    router = Noting(plan=[0, 0, 1, 0, 0])
    requests, leases = play(trace, router, 2, Scaling("planned", 1), config)
    assert all(request.end_reason is EndReason.STOP for request in requests)
    assert spans(leases) == [(0, 0, 0, None, 12), (1, 1, 3, 4, 8.5)]


def test_a_place_is_free_only_after_the_drain(planned: list[int]) -> None:
    planned += [2, 2, 2, 1, 2, 2, 2, 2, 2, 2]
    router = Noting(plan=[0, 0, 1, *[0] * 20])
    trace = make_trace((0, 8, 30), (0.5, 8, 30), (3.5, 8, 4), *[(6.0 + i, 8, 1) for i in range(8)])
    _, leases = play(trace, router, 2, Scaling("planned", 1))
    # Wanted again at 5; the place is free at 7.5, so that the next decision, at 8, fills it.
    assert spans(leases)[1:] == [(1, 1, 3, 4, 7.5), (1, 8, 10, None, spans(leases)[0][4])]


def test_what_starts_is_given_up_first(planned: list[int]) -> None:
    planned += [3, 2, 2]
    trace = make_trace((0, 8, 3), (3, 8, 3))
    _, leases = play(trace, RoundRobin(), 3, Scaling("planned", 1))
    assert spans(leases) == [(0, 0, 0, None, 6), (1, 1, 3, None, 6), (2, 1, 3, 2, 2)]


def test_a_replica_that_failed_is_replaced_by_the_next_decision(planned: list[int]) -> None:
    planned += [2]
    config = replace(CONFIG, failures=(Failure(1.5, 1),))
    trace = make_trace((0, 8, 9), (1, 8, 9), (6, 8, 1))
    requests, leases = play(trace, LeastRequests(), 2, Scaling("planned", 2), config)
    assert [request.end_reason for request in requests] == [EndReason.STOP] * 3
    assert [each[:4] for each in spans(leases)] == [
        (0, 0, 0, None),
        (1, 0, 0, 1.5),
        (1, 2, 4, None),
    ]


def test_the_fleet_keeps_to_its_limits_and_shrinks_late(planned: list[int]) -> None:
    planned += [9, 0, 0, 0, 0]
    trace = make_trace(*[(0.5 * i, 8, 1) for i in range(20)])
    _, leases = play(trace, RoundRobin(), 3, Scaling("planned:hold_s=3", 2))
    assert [lease.from_s for lease in leases] == [0, 0, 1]
    # The decision of 1 holds until 4, that of 5 is the first without it.
    assert [lease.closed_s for lease in leases if lease.closed_s] == [5]


def test_a_fixed_fleet_costs_its_replicas_to_the_last_end() -> None:
    trace = make_trace((0.0, 8, 3), (0.5, 8, 3))
    config = replace(CONFIG, failures=(Failure(1.0, 1),))
    _, leases = play(trace, Noting(plan=[0, 0]), 2, None, config)
    assert spans(leases) == [(0, 0, 0, None, 4), (1, 0, 0, 1, 1), (1, 1, 3, None, 4)]
    four = load_model("h100/llama-3.1-70b-tp4")
    assert ReplicaKind(four, SimulationConfig()).num_gpus == 4


@pytest.mark.parametrize(
    ("is_closed", "delay_s"),
    [
        (True, 0.25),
        pytest.param(True, 0.0, marks=pytest.mark.slow),
        pytest.param(False, 0.0, marks=pytest.mark.slow),
        pytest.param(False, 0.25, marks=pytest.mark.slow),
    ],
)
def test_with_as_few_as_many_replicas_it_is_the_fixed_fleet(
    is_closed: bool, delay_s: float
) -> None:
    """On random scenarios this is one of the laws of scalers."""
    if is_closed:
        trace = synthesize("agents", num_requests=60, rate=1.0, seed=1).clipped(2000, 20).trace
    else:
        trace = (
            synthesize("azure_conv", num_requests=400, rate=20.0, seed=1).clipped(2000, 60).trace
        )
    trace = trace.with_slo(SLO(1.0, 0.05))
    model = load_model("l40s/llama-3.1-8b")
    replicas = [ReplicaKind(model, SimulationConfig())] * 3
    config = FleetConfig(delay_s=delay_s, startup_s=1.0)

    def fates(scaling: Scaling | None) -> list[tuple[object, ...]]:
        requests = simulate_fleet(
            trace, make_policy("goodput"), replicas, LeastRequests(), config, scaling=scaling
        )
        return [(r.request_id, r.end_s, r.end_reason, tuple(r.token_times_s)) for r in requests]

    fixed = fates(None)
    for scaler in SCALERS:
        assert fates(Scaling(f"{scaler}:every_s=0.7", 3)) == fixed, scaler


@pytest.mark.parametrize(
    "scaler",
    [
        "queue_length:target=0.5,every_s=0.002,hold_s=0",
        "kv_use:target=0.2,every_s=0.002,hold_s=0",
        "predicted:window_s=0.01,every_s=0.002,hold_s=0.004",
        "flapping",
    ],
)
@pytest.mark.parametrize("policy", ["fcfs", "goodput"])
@pytest.mark.usefixtures("flapping")
def test_the_laws_hold(scaler: str, policy: str) -> None:
    check_scaler(scaler, partial(make_policy, policy), max_examples=12)


def state(
    replicas: Sequence[ReplicaView], num_starting: int = 0, now_s: float = 60.0
) -> FleetState:
    (kind,) = make_replicas(1)
    return FleetState(now_s, replicas, num_starting, kind, startup_s=30.0)


@pytest.mark.usefixtures("flapping")
def test_the_laws_catch_a_fleet_that_forgets_what_it_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(roster: Roster, now_s: float) -> None:
        roster._end(roster.up.pop(), now_s)

    monkeypatch.setattr(Roster, "_close", forget)
    with pytest.raises(LawBrokenError, match="has no end"):
        check_scaler("flapping", FCFS, max_examples=30, shrink=False)


class Asking(Router):
    """Lets a scaler decide at each arrival, and notes what it wants."""

    def __init__(self, scaler: str) -> None:
        self.scaler = make_scaler(scaler)
        self.wanted: list[int] = []

    def route(self, request: Request, replicas: Sequence[ReplicaView]) -> ReplicaView:
        self.scaler.note_arrival(request)
        self.wanted.append(self.scaler.num_wanted(state(replicas, now_s=request.arrival_s)))
        return replicas[0]


def test_queue_length_counts_requests_without_a_first_token() -> None:
    # A step has room for one prompt; the one that it computes does not wait any more.
    trace = make_trace((0.0, 2048, 9), (0.1, 2048, 9), (0.2, 2048, 9), (0.3, 8, 1), (9.5, 8, 1))
    asking = Asking("queue_length:target=1")
    simulate_fleet(trace, FCFS(), make_replicas(1, kv_tokens=16384), asking)
    assert asking.wanted == [0, 0, 1, 2, 0]


def test_kv_use_follows_the_blocks_that_are_held() -> None:
    # 160 tokens are 10 of 20 blocks, and the first decode takes an eleventh.
    trace = make_trace((0.0, 160, 3), (0.5, 8, 1), (1.5, 8, 1), (9.0, 8, 1))
    asking = Asking("kv_use:target=0.1")
    simulate_fleet(trace, FCFS(), make_replicas(1, kv_tokens=320), asking)
    assert asking.wanted == [0, 5, 6, 0]


def test_predicted_divides_the_expected_rate_by_what_a_replica_sustains() -> None:
    # A step takes 1 s, and 256 requests of 8 tokens each end 32 requests/s; half of that is 16.
    trace = make_trace(*[(0.05 * i, 8, 8) for i in range(20 * 20)])
    asking = Asking("predicted:window_s=4,load=0.5")
    simulate_fleet(trace, FCFS(), make_replicas(1, kv_tokens=2**16), asking)
    assert asking.wanted[:20] == [1] * 20, "nothing has ended yet"
    assert set(asking.wanted[300:]) == {math.ceil(20 / 16)}


def test_predicted_sees_a_rise_coming() -> None:
    # 10 requests/s for 8 s, then 20: the line through both halves rises on for 30 s.
    early = [(0.1 * i, 8, 1) for i in range(80)]
    late = [(8 + 0.05 * i, 8, 1) for i in range(160)]
    asking = Asking("predicted:window_s=16,load=1")
    simulate_fleet(make_trace(*early, *late), FCFS(), make_replicas(1, kv_tokens=2**16), asking)
    # It is 20 + 10 / 8 * (30 + 4) = 62.5 requests/s at the end, and one replica sustains 256.
    kind = make_replicas(1, kv_tokens=2**16)[0]
    sustained = sustained_rate(kind, MeanRequest(8, 1))
    assert asking.wanted[-1] == math.ceil(62.5 / sustained) == 1
    few = ReplicaKind(kind.model, replace(kind.config, limits=Limits(max_num_seqs=16)))
    assert sustained_rate(few, MeanRequest(8, 1)) == 16


def test_predicted_lets_a_fleet_go_when_hardly_anything_comes_any_more() -> None:
    # A replica sustains 32 requests/s of 8 tokens each, of which it is to serve 0.64.
    busy = [(0.5 * i, 8, 8) for i in range(40)]
    quiet = [(60.0 * i, 8, 8) for i in (1, 2, 3)]
    leases: list[Lease] = []
    simulate_fleet(
        make_trace(*busy, *quiet),
        FCFS(),
        make_replicas(4, kv_tokens=2**16),
        LeastRequests(),
        CONFIG,
        scaling=Scaling("predicted:window_s=10,load=0.02,every_s=5,hold_s=5", 1),
        on_lease=leases.append,
    )
    assert len(leases) == 3
    closed_s = [lease.closed_s for lease in leases if lease.closed_s is not None]
    assert len(closed_s) == 2, "one stays, as the fleet must"
    assert max(closed_s) <= 60.0


@pytest.mark.parametrize(
    ("num_now", "measured", "wanted"), [(4, 5.4, 4), (4, 5.6, 5), (4, 15, 12), (4, 0, 0)]
)
def test_the_ratio_rule_of_kubernetes(num_now: int, measured: float, wanted: int) -> None:
    assert scaled_by_ratio(num_now, measured, target=5) == wanted


@pytest.mark.parametrize("target", [1, 2, 4, 5])
def test_the_ratio_rule_counts_as_exactly_as_fractions(target: int) -> None:
    for num_now, total in product(range(1, 33), range(200)):
        wanted = math.ceil(Fraction(total, target))
        if abs(Fraction(total, num_now * target) - 1) <= Fraction(1, 10):
            wanted = num_now
        assert scaled_by_ratio(num_now, total / num_now, target) == wanted, (num_now, total)


def test_the_sustained_rate_is_that_of_the_largest_step_within_the_tpot() -> None:
    # A step takes 10 ms and 1 ms for each token.
    model = LinearModel(LinearCoefficients(0.001, 0, 0, 0, 0, 0, constant_s=0.01))
    kind = ReplicaKind(model, SimulationConfig(num_blocks=4096))
    mean = MeanRequest(prompt_tokens=40, output_tokens=10, tpot_s=0.1)
    # B decodes bring 4 B prompt tokens: 5 B <= 90, so B is 18, and 1.8 requests end in 100 ms.
    assert sustained_rate(kind, mean) == pytest.approx(18)
    assert sustained_rate(kind, mean._replace(tpot_s=0.001)) == pytest.approx(0.1 / 0.015)
    # 20 requests of 45 tokens fill a cache of 57 blocks of 16.
    small = ReplicaKind(model, SimulationConfig(num_blocks=57))
    unhurried = sustained_rate(small, mean._replace(tpot_s=math.inf))
    assert unhurried == pytest.approx(2 / 0.11)


@pytest.mark.parametrize(("share", "is_kept"), [(0.8, True), (1.2, False)])
def test_a_simulated_replica_serves_what_it_sustains_and_not_much_more(
    share: float, is_kept: bool
) -> None:
    model = load_model("l40s/llama-3.1-8b")
    kind = ReplicaKind(model, SimulationConfig(num_blocks=10_000))
    rate = sustained_rate(kind, MeanRequest(512, 128, 0.05))
    trace = synthesize("poisson", num_requests=600, rate=share * rate, prompt=512, output=128)
    trace = trace.with_slo(SLO(1.0, 0.05))
    requests = simulate_fleet(trace, make_policy("goodput"), [kind], RoundRobin())
    records = records_of(requests, DeadlineRule.MEAN_TPOT)[300:]
    kept = summarize(records, DeadlineRule.MEAN_TPOT).attainment
    assert (kept > 0.99) is is_kept
    assert kept > 0.7, "it rejects what is too much, and serves the rest"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("queue_len", "did you mean queue_length"),
        ("kv_use:target=2", "target"),
        ("predicted:window=3", "did you mean"),
        ("predicted:every_s=0", "every_s must be positive"),
        ("queue_length:hold_s=-1", "hold_s must be at least 0"),
    ],
)
def test_a_scaler_that_cannot_be_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ScalerSpecError, match=message):
        make_scaler(spec)


@pytest.mark.parametrize(
    ("scaling", "config", "message"),
    [
        (Scaling("kv_use", 0), CONFIG, "must be 1 to 2"),
        (Scaling("kv_use", 3), CONFIG, "must be 1 to 2"),
        (Scaling("kv_use", 1), FleetConfig(), "finite start-up time"),
    ],
)
def test_scaling_that_cannot_be_is_refused(
    scaling: Scaling, config: FleetConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        play(make_trace((0.0, 8, 1)), RoundRobin(), 2, scaling, config)


def test_replicas_that_are_scaled_are_of_one_kind() -> None:
    fleet = [*make_replicas(1), *make_replicas(1, kv_tokens=64)]
    with pytest.raises(ValueError, match="of one kind"):
        simulate_fleet(
            make_trace((0.0, 8, 1)),
            FCFS(),
            fleet,
            RoundRobin(),
            CONFIG,
            scaling=Scaling("kv_use", 1),
        )
