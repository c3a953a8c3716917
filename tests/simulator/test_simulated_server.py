"""What a server adds to its device reaches clients, deadlines, steps and bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_model

from slosched.core import SLO, Request
from slosched.evaluate.bounds import bounds_of
from slosched.evaluate.comparison import Replica
from slosched.metrics import RequestRecord, is_good
from slosched.perfmodel import NO_SERVER_TIME, ServerTime, load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest

MODEL = load_model("h100/llama-3.1-8b")
CONFIG = SimulationConfig(num_blocks=2048)
TIMES = ServerTime(0.020, 0.002, 0.003)
POLICIES = ("edf:drop=expired", "slo_aware", "goodput", "vllm_v1")


def crowd(ttft_s: float = 0.4) -> Trace:
    """Return a load at which some requests of every policy are late."""
    slo = SLO(ttft_s=ttft_s, tpot_s=0.02)
    requests = [
        TraceRequest(
            f"r{i}", 0.03 * i + 0.2 * (i % 7 == 0), 200 + 137 * i % 1900, 5 + 29 * i % 60, slo
        )
        for i in range(80)
    ]
    return Trace.of(requests, "crowd")


def played(policy: str, times: ServerTime, config: SimulationConfig = CONFIG) -> list[Request]:
    replica = Replica.of(MODEL, "h100", config, times)
    return simulate(crowd(), make_policy(policy), replica.model, replica.config)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_time_per_request_is_as_good_as_a_ttft_that_is_shorter_by_it(policy: str) -> None:
    """The policy plans for the client's deadline, not for the engine's clock."""
    replica = Replica.of(MODEL, "h100", CONFIG, ServerTime(per_request_s=0.25))
    later = simulate(crowd(ttft_s=0.5), make_policy(policy), replica.model, replica.config)
    tighter = simulate(crowd(ttft_s=0.25), make_policy(policy), MODEL, CONFIG)
    for ours, bare in zip(later, tighter, strict=True):
        assert ours.end_reason is bare.end_reason
        assert ours.token_times_s == pytest.approx([t + 0.25 for t in bare.token_times_s])


def test_a_time_per_request_moves_ttft_and_e2e_but_not_tpot() -> None:
    bare = [RequestRecord.from_request(r) for r in played("fcfs", NO_SERVER_TIME)]
    seen = [RequestRecord.from_request(r) for r in played("fcfs", ServerTime(0.125))]
    for with_it, without in zip(seen, bare, strict=True):
        assert with_it.ttft_s == pytest.approx((without.ttft_s or 0.0) + 0.125)
        assert with_it.e2e_s == pytest.approx((without.e2e_s or 0.0) + 0.125)
        assert with_it.tpot_s == pytest.approx(without.tpot_s)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_grouped_simulation_is_exact_with_a_servers_times(policy: str) -> None:
    config = replace(CONFIG, seed=3)
    replica = Replica.of(MODEL, "h100", config, TIMES)
    grouped = simulate(crowd(), make_policy(policy), replica.model, replica.config)
    plain = simulate(
        crowd(), make_policy(policy), replica.model, replica.config, on_step=lambda _record: None
    )
    assert [r.token_times_s for r in grouped] == [r.token_times_s for r in plain]
    assert [r.end_reason for r in grouped] == [r.end_reason for r in plain]


def test_no_times_give_the_bare_device_to_the_bit() -> None:
    bare = simulate(crowd(), make_policy("goodput"), MODEL, CONFIG)
    none = played("goodput", NO_SERVER_TIME)
    assert [r.token_times_s for r in none] == [r.token_times_s for r in bare]


def test_the_host_costs_every_step_unless_the_next_one_is_planned_meanwhile() -> None:
    alone = Trace.of([TraceRequest("r0", 0.0, 8, 40)], "alone")
    model = make_model(0, 0, 0, 0, 0, 0, 1.0)  # every step takes a second

    def end_s(times: ServerTime, *, overlap: bool) -> float:
        replica = Replica.of(model, "slow", SimulationConfig(overlap=overlap), times)
        [request] = simulate(alone, make_policy("fcfs"), replica.model, replica.config)
        return request.token_times_s[-1]

    host, device = ServerTime(per_step_host_s=0.5), ServerTime(per_step_device_s=0.5)
    assert end_s(host, overlap=False) == 60.0
    assert end_s(host, overlap=True) == 40.5, "only the first one hides behind nothing"
    assert end_s(device, overlap=False) == end_s(device, overlap=True) == 60.0


def test_a_policy_knows_what_its_server_adds_to_a_step() -> None:
    """A step that fills the TPOT to the last millisecond must leave the server its share."""
    times = ServerTime(per_step_device_s=0.004)
    records = [RequestRecord.from_request(r) for r in played("slo_aware", times)]
    tpot_s = [r.tpot_s for r in records if r.tpot_s is not None]
    assert sum(t <= 0.0201 for t in tpot_s) >= 0.9 * len(tpot_s)


@pytest.mark.parametrize("overlap", [False, True])
def test_bounds_stay_bounds(overlap: bool) -> None:
    replica = Replica.of(MODEL, "h100", replace(CONFIG, overlap=overlap), TIMES)
    bounds = bounds_of(crowd(), replica.model, replica.config).each
    rule = replica.config.limits.deadline_rule
    for policy in POLICIES:
        requests = simulate(crowd(), make_policy(policy), replica.model, replica.config)
        num_good = sum(is_good(RequestRecord.from_request(r), rule) for r in requests)
        for bound in bounds:
            assert 0 < num_good <= bound.num_good, policy
