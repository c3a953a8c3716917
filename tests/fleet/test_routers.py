"""Where each router sends a request, on fleets that are small enough to say why."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from weakref import WeakSet

import pytest
from fleets import A_SECOND_A_STEP, TWO_SECONDS_A_STEP, make_replicas, make_trace

from slosched.core import SLO, Policy, Request
from slosched.fleet.router import R, Replica, Router
from slosched.fleet.routers import ROUTERS
from slosched.fleet.simulate import Failure, FleetConfig, simulate_fleet
from slosched.fleet.spec import RouterSpecError, make_router
from slosched.fleet.view import ReplicaKind
from slosched.kv import PrefixCaching
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.policy import FCFS
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.trace import Trace, TraceRequest

A_TOKEN_COUNTS = LinearModel(LinearCoefficients(2.0**-6, 0, 0, 0, 0, 0, constant_s=2.0**-4))


class Noting(Router):
    """Another router, with a list of the replicas that it chose."""

    def __init__(self, spec: str) -> None:
        self.inner = make_router(spec)
        self.chosen: list[int] = []

    def reset(self) -> None:
        self.inner.reset()

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        chosen = self.inner.route(request, replicas)
        self.chosen.append(chosen.index)
        return chosen


def choices(spec: str, trace: Trace, fleet: Sequence[ReplicaKind]) -> list[int]:
    router = Noting(spec)
    simulate_fleet(trace, FCFS(), fleet, router)
    return router.chosen


def test_round_robin_takes_turns() -> None:
    trace = make_trace(*[(0.1 * i, 8, 1) for i in range(5)])
    assert choices("round_robin", trace, make_replicas(3)) == [0, 1, 2, 0, 1]


def test_least_requests_takes_the_replica_with_the_fewest_in_flight() -> None:
    trace = make_trace((0.0, 8, 9), (0.1, 8, 1), (0.2, 8, 9), (1.5, 8, 1))
    assert choices("least_requests", trace, make_replicas(2)) == [0, 1, 0, 1]


def test_least_tokens_weighs_requests_by_their_prompts() -> None:
    trace = make_trace((0.0, 100, 9), (0.1, 8, 9), (0.2, 8, 9), (0.3, 8, 9))
    assert choices("least_tokens", trace, make_replicas(2)) == [0, 1, 1, 1]


def test_power_of_two_is_random_with_a_seed_and_never_takes_the_fuller_of_two() -> None:
    trace = make_trace(*[(0.01 * i, 8, 50) for i in range(60)])
    fleet = make_replicas(3)
    chosen = choices("power_of_two", trace, fleet)
    assert choices("power_of_two", trace, fleet) == chosen
    assert choices("power_of_two:seed=1", trace, fleet) != chosen
    counts = Counter(chosen)
    assert max(counts.values()) - min(counts.values()) <= 3


def with_prefixes(*lines: tuple[float, int, Sequence[int]]) -> Trace:
    """Make a trace from (arrival_s, prompt tokens, prefix hashes of 16 tokens each)."""
    requests = [
        TraceRequest(f"r{i}", at_s, prompt, 4, prefix_hashes=tuple(hashes))
        for i, (at_s, prompt, hashes) in enumerate(lines)
    ]
    return Trace.of(requests, "prefixes", prefix_block_tokens=16)


def caching(
    num: int, model: LinearModel = A_TOKEN_COUNTS, kv_tokens: int = 4096
) -> list[ReplicaKind]:
    config = SimulationConfig(num_blocks=kv_tokens // 16, prefix_cache=PrefixCaching.HASH)
    return [ReplicaKind(model, config)] * num


@pytest.mark.parametrize(
    "router", ["prefix_affine", "lmetric", "predicted_ttft", "cheapest_in_time"]
)
def test_a_prompt_goes_where_its_prefix_was_sent_unless_that_replica_has_too_much_to_do(
    router: str,
) -> None:
    a, b = range(4), range(10, 14)
    trace = with_prefixes((0.0, 64, a), (0.1, 64, b), (60.0, 64, b), (120.0, 64, a))
    assert choices(router, trace, caching(2)) == [0, 1, 1, 0]
    slo = SLO(ttft_s=6.0, tpot_s=1.0)
    flood = with_prefixes(*[(0.01 * i, 70, a) for i in range(20)]).with_slo(slo)
    assert set(choices(router, flood, caching(2))) == {0, 1}


def test_prefixes_count_for_nothing_without_a_prefix_cache() -> None:
    a, b = range(4), range(10, 14)
    trace = with_prefixes((0.0, 64, a), (0.1, 64, b), (60.0, 64, b))
    fleet = [ReplicaKind(A_TOKEN_COUNTS, SimulationConfig())] * 2
    assert choices("prefix_affine", trace, fleet) == [0, 1, 0]


@pytest.mark.parametrize("name", ["prefix_affine", "lmetric"])
def test_a_replica_that_left_the_fleet_is_forgotten_with_what_it_was_sent(name: str) -> None:
    class Watching(Noting):
        def route(self, request: Request, replicas: Sequence[R]) -> R:
            seen.update(replicas)
            return super().route(request, replicas)

    seen: WeakSet[Replica] = WeakSet()
    trace = with_prefixes(*[(60.0 * i, 64, range(4 * i, 4 * i + 4)) for i in range(10)])
    failures = tuple(Failure(30.0 + 60.0 * i, 0) for i in range(9))
    config = FleetConfig(failures=failures, startup_s=1.0)
    router = Watching(name)
    simulate_fleet(trace, FCFS(), caching(1), router, config)
    assert router.chosen == [0] * 10
    gc.collect()
    assert len(seen) <= 1, "ten replicas, one after the other"


def test_a_replica_is_trusted_with_no_more_prefixes_than_it_can_hold() -> None:
    a, b, c, d = (range(first, first + 4) for first in (0, 10, 20, 30))
    lines = [(0.0, 64, a), (60.0, 64, b), (120.0, 64, c), (180.0, 8, d[:0]), (180.1, 64, a)]
    # All find both replicas idle, and go to the first.  Only before the last one does it have work.
    assert choices("prefix_affine", with_prefixes(*lines), caching(2)) == [0, 0, 0, 0, 0]
    # It holds two of the prompts, and the first of the three is forgotten.
    small = caching(2, kv_tokens=128)
    assert choices("prefix_affine", with_prefixes(*lines), small) == [0, 0, 0, 0, 1]


def test_lmetric_multiplies_what_is_to_prefill_by_the_requests() -> None:
    decoding = [(0.0, 8, 20), (0.1, 8, 20), (0.2, 8, 20)]  # the second replica has one of them
    # 100 tokens: 2 x 100 or 1 x 100.  10: 2 x 10 or 2 x 110, then 3 x 20 or 2 x 110.
    # 400, behind 20 or 100 others: 4 x 420 or 2 x 500.
    new = [(3.02, 100, 9), (3.04, 10, 9), (3.06, 10, 9), (3.08, 400, 9)]
    trace = make_trace(*decoding, *new)
    assert choices("lmetric", trace, make_replicas(2)) == [0, 1, 0, 1, 0, 0, 1]


def test_predicted_ttft_asks_each_replica_s_own_model() -> None:
    fleet = [*make_replicas(1, TWO_SECONDS_A_STEP), *make_replicas(1, A_SECOND_A_STEP)]
    trace = make_trace((0.0, 8, 1), (0.0, 8, 1), (0.0, 8, 1))
    # The third would take 2 s on the slow replica, and 3 s behind two others on the fast one.
    assert choices("predicted_ttft", trace, fleet) == [1, 0, 1]


class Asking(Router):
    """Sends all to the first replica, and notes the TTFT that it is expected to have."""

    def __init__(self) -> None:
        self.expected_s: list[float] = []

    def route(self, request: Request, replicas: Sequence[R]) -> R:
        self.expected_s.append(replicas[0].expected_ttft_s(request))
        return replicas[0]


def expected_ttfts_s(policy: Policy, trace: Trace) -> list[float]:
    asking = Asking()
    simulate_fleet(trace, policy, [ReplicaKind(A_TOKEN_COUNTS, SimulationConfig())], asking)
    return asking.expected_s


def test_the_expected_ttft_counts_the_running_step_and_the_decodes_beside() -> None:
    trace = make_trace((0.0, 100, 3), (60.0, 200, 3), (60.5, 50, 3))
    fleet = [ReplicaKind(A_TOKEN_COUNTS, SimulationConfig())]
    requests = simulate_fleet(trace, FCFS(), fleet, Asking())
    actual = [request.token_times_s[0] - request.arrival_s for request in requests]
    assert expected_ttfts_s(FCFS(), trace) == pytest.approx(actual)


@pytest.mark.parametrize(
    ("policy", "prompts_ahead"),
    [("fcfs", "abcd"), ("sjf", "ac"), ("edf", "ab"), ("goodput", "a")],
)
def test_the_expected_ttft_counts_the_prompts_that_the_policy_serves_first(
    policy: str, prompts_ahead: str
) -> None:
    soon, late = SLO(ttft_s=50.0, tpot_s=1.0), SLO(ttft_s=500.0, tpot_s=1.0)
    waiting = {"a": (100, soon), "b": (300, soon), "c": (100, late), "d": (300, late)}

    def of_the_last(names: str) -> float:
        """Return what is expected of a prompt that comes after those of these names."""
        lines = [TraceRequest("running", 0.0, 100, 2, soon)]
        lines += [TraceRequest(name, 1.0, num, 2, slo) for name, (num, slo) in waiting.items()]
        lines += [TraceRequest("last", 1.1, 200, 2, SLO(ttft_s=51.0, tpot_s=1.0))]
        kept = [line for line in lines if line.request_id not in set(waiting) - set(names)]
        return expected_ttfts_s(make_policy(policy), Trace.of(kept, "prompts ahead"))[-1]

    assert of_the_last("abcd") == pytest.approx(of_the_last(prompts_ahead), rel=0.01)
    assert of_the_last(prompts_ahead) > 1.3 * of_the_last(prompts_ahead[:-1])


def test_slo_bins_keep_tiers_apart_and_fill_one_replica_first() -> None:
    tight, loose = SLO(ttft_s=30.0, tpot_s=2.0), SLO(ttft_s=30.0, tpot_s=9.0)
    lines = [TraceRequest(f"r{i}", 1.5 * i, 8, 4, tight if i % 2 else loose) for i in range(12)]
    chosen = choices("slo_bins", Trace.of(lines, "tiers"), make_replicas(4))
    assert set(chosen[3::2]) <= {0, 1}
    assert set(chosen[4::2]) <= {2, 3}


def test_slo_bins_lend_replicas_of_a_tighter_tier_to_a_looser_one() -> None:
    tight, loose = SLO(ttft_s=30.0, tpot_s=2.0), SLO(ttft_s=1.5, tpot_s=9.0)
    slos = [tight, *[loose] * 4]
    lines = [TraceRequest(f"r{i}", 10 + 0.1 * i, 8, 4, slo) for i, slo in enumerate(slos)]
    chosen = choices("slo_bins", Trace.of(lines, "tiers"), make_replicas(2))
    assert chosen[1] == 1
    assert 0 in chosen[2:]


def test_cheapest_in_time_spares_the_expensive_device_until_the_promise_needs_it() -> None:
    fast = LinearModel(LinearCoefficients(2.0**-8, 0, 0, 0, 0, 0, constant_s=2.0**-6))
    fleet = [ReplicaKind(A_TOKEN_COUNTS, SimulationConfig()), ReplicaKind(fast, SimulationConfig())]
    trace = make_trace(*[(0.0, 512, 1)] * 3, slo=SLO(ttft_s=10.0, tpot_s=1.0))
    # The fast device takes less of its time for the prompt, until its queue is too long.
    assert choices("cheapest_in_time", trace, fleet)[:2] == [1, 1]
    flood = make_trace(*[(0.0, 512, 1)] * 12, slo=SLO(ttft_s=30.0, tpot_s=1.0))
    assert 0 in choices("cheapest_in_time", flood, fleet)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("round_robbin", "did you mean"),
        ("power_of_two:num=3", "no option 'num=3'"),
        ("power_of_two:num_choices=two", "not of type int"),
        ("power_of_two:num_choices=0", "at least 1"),
        ("prefix_affine:overlap_weight=-1", "must not be negative"),
        ("cheapest_in_time:margin=2", r"margin must be in \(0, 1\]"),
    ],
)
def test_a_spec_that_names_no_router_is_refused(spec: str, message: str) -> None:
    with pytest.raises(RouterSpecError, match=message):
        make_router(spec)


def test_every_router_says_what_it_does() -> None:
    assert all((router.__doc__ or "").strip() for router in ROUTERS.values())
