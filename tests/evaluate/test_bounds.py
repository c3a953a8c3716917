"""Tests that no policy, no exhaustive search and no step of a bundled model exceeds a bound."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from every_schedule import SMALL, most_good, random_trace
from factories import make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from slosched.core import NO_SLO, SLO, BatchShape, DeadlineRule, LatencyModel, Limits
from slosched.evaluate.bounds import (
    Bound,
    LegalSteps,
    Pace,
    Roofline,
    bounds_of,
    capacity_bound,
    demand_of,
    fluid_bound,
    hindsight_bound,
    on_time_bound,
    roofline_bound,
    roofline_of,
)
from slosched.kv import PrefixCaching
from slosched.metrics import RequestRecord, is_good
from slosched.perfmodel import bundled_models, load_model
from slosched.perfmodel.peaks import GPUS
from slosched.perfmodel.transformers import MODELS
from slosched.policy import POLICIES
from slosched.policy.spec import make_policy
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest, read_trace

CONV = Path(__file__).parents[3] / "shared" / "traces" / "azure_conv_2023.csv"


def bounds(trace: Trace, model: LatencyModel, limits: Limits) -> list[Bound]:
    """Return L1, L2 and L3, the loosest first."""
    demand = demand_of(trace, model, limits)
    return [fluid_bound(demand), on_time_bound(demand), hindsight_bound(trace, model, limits)]


@pytest.mark.parametrize("rule", DeadlineRule)
def test_no_policy_beats_a_bound(rule: DeadlineRule) -> None:
    limits = Limits(max_num_batched_tokens=8, max_num_seqs=4, deadline_rule=rule)
    num_binding = 0
    for seed in range(12):
        trace = random_trace(seed)
        l1, l2, l3 = bounds(trace, SMALL, limits)
        assert l2.num_good <= l1.num_good <= len(trace)
        most = min(l2.num_good, l3.num_good)
        num_binding += most < len(trace)
        for policy in POLICIES.values():
            requests = simulate(trace, policy(), SMALL, SimulationConfig(limits))
            good = sum(is_good(RequestRecord.from_request(r), rule) for r in requests)
            assert good <= most, (seed, policy)
    assert num_binding >= 3, "bounds that never bind test nothing"


def test_no_schedule_beats_a_bound_and_some_reach_it() -> None:
    limits = Limits(max_num_batched_tokens=4, deadline_rule=DeadlineRule.ENVELOPE)
    num_binding = num_reached = num_paced = 0
    for seed in range(40):
        trace = random_trace(seed, most_requests=3, most_tokens=3)
        l1, l2, l3 = bounds(trace, SMALL, limits)
        optimum = most_good(trace, SMALL, 4)
        assert optimum <= l2.num_good <= l1.num_good, seed
        assert optimum <= l3.num_good, seed
        l5 = paced(trace, limits)
        assert optimum <= l5, seed
        num_binding += l2.num_good < len(trace)
        num_reached += optimum == l2.num_good
        num_paced += l5 < len(trace)
    assert num_binding >= 5
    assert num_reached >= 10
    assert num_paced >= 5


def paced(trace: Trace, limits: Limits) -> int:
    """Return L5 of the trace, repeated with so much time in between that periods do not meet."""
    last = TraceRequest("last", 60.0, 1, 1, SLO(5.0, 1.0))
    whole = Trace.of([*trace.requests, last], "with a pause")
    return Pace(whole, SMALL, limits).bound(whole.rate).num_good - 1


EVERY_FORM = {load_model(name).form: name for name in bundled_models()}


@pytest.mark.parametrize("kv_tokens", [None, 30_000])
@pytest.mark.parametrize("name", EVERY_FORM.values(), ids=EVERY_FORM)
def test_no_legal_step_undercuts_the_prices(name: str, kv_tokens: int | None) -> None:
    model, limits, longest = load_model(name), Limits(2048, 256), 4096
    steps = LegalSteps(model, limits, longest, kv_tokens)
    many = [steps.dearest(np.array([1e6, 2e5, 7e8, 2e8, n])) for n in (0, 1e4)]
    rng = np.random.default_rng(1)
    for _ in range(500):
        shape, left = BatchShape(), int(2 ** rng.uniform(0, 11))
        most_decodes = int(rng.integers(0, 257))
        longest_here = int(2 ** rng.uniform(2, 12))
        free = kv_tokens or 256 * longest
        while left and shape.num_reqs < 256 and free > 1:
            is_chunk = shape.num_decodes >= most_decodes
            new = min(left, int(rng.integers(2, 1500))) if is_chunk else 1
            new = min(new, longest_here, free)
            prior = int(rng.integers(0, min(longest_here, free) - new + 1))
            shape.add(new, prior)
            left -= new
            free -= new + prior
        for prices in many:
            assert prices.cost_s(shape) <= model.predict(shape), shape


def test_easy_traces_are_all_good_and_impossible_ones_not_at_all() -> None:
    limits = Limits(16, 4)
    trace = random_trace(3)
    for easy in (NO_SLO, SLO(1e6, 1e6)):
        assert [b.num_good for b in bounds(trace.with_slo(easy), SMALL, limits)] == [len(trace)] * 3
    for hard in (SLO(0.1, 9.0), SLO(99.0, 99.0, e2e_s=0.2)):
        assert [b.num_good for b in bounds(trace.with_slo(hard), SMALL, limits)] == [0, 0, 0]


def test_a_tpot_below_the_shortest_step_is_impossible_unless_slack_is_banked() -> None:
    requests = (TraceRequest("a", 0.0, 2, 4, SLO(30.0, 0.1)),)
    trace = Trace(requests, "one")
    for rule, good in (("mean_tpot", 0), ("tbt", 0), ("envelope", 1)):
        limits = Limits(16, 4, deadline_rule=DeadlineRule(rule))
        assert [b.num_good for b in bounds(trace, SMALL, limits)] == [good] * 3, rule


def test_a_burst_is_seen_by_the_on_time_count_alone() -> None:
    """Play two bursts an hour apart, so that no request may use the time between them."""
    burst = [
        TraceRequest(f"{start}-{i}", start, 4, 1, SLO(4.0, 1.0))
        for start in (0.0, 3600.0)
        for i in range(10)
    ]
    l1, l2, l3 = bounds(Trace.of(burst, "bursts"), SMALL, Limits(8))
    assert l1.num_good == 20
    assert l2.num_good < 20
    assert l3.num_good < 20


def test_bounds_of_says_which_is_tightest_and_when_none_holds() -> None:
    trace = random_trace(4, most_requests=5)
    config = SimulationConfig(Limits(8))
    found = bounds_of(trace, SMALL, config)
    assert found.tightest.num_good == min(b.num_good for b in found.each)
    assert found.ratio(found.tightest.num_good) == 1.0
    for kind in ("noise", "drift", "tail", "stall_s"):
        disturbances = Disturbances(**{kind: 0.1})
        noisy = bounds_of(trace, SMALL, replace(config, disturbances=disturbances))
        assert noisy.each == found.each
        assert f"({kind} 0.1" in (noisy.why_none_holds or "")
        assert math.isnan(noisy.ratio(1))


def test_no_bound_holds_where_a_sliding_window_gives_back_kv_blocks() -> None:
    model = load_model("h100/llama-3.1-8b")
    slo = SLO(3.0, 0.03)
    requests = [TraceRequest(str(i), 0.2 * i, 4000, 600, slo) for i in range(30)]
    trace = Trace.of(requests, "long prompts")
    config = SimulationConfig(num_blocks=625, window_tokens=256)
    found = bounds_of(trace, model, config)
    served = simulate(trace, make_policy("goodput"), model, config)
    num_good = sum(
        is_good(RequestRecord.from_request(request), DeadlineRule.MEAN_TPOT) for request in served
    )
    assert num_good > found.tightest.num_good, "or there is no need to say so"
    assert "sliding window" in (found.why_none_holds or "")
    cached = replace(config, prefix_cache=PrefixCaching.HASH)
    assert bounds_of(trace, model, cached).why_none_holds is None, "then nothing is given back"


def test_a_request_that_does_not_fit_into_the_kv_cache_is_not_counted() -> None:
    requests = [TraceRequest(name, 0.0, n, 2, SLO(99.0, 99.0)) for name, n in (("a", 9), ("b", 40))]
    config = SimulationConfig(Limits(64), num_blocks=2, block_size=16)
    found = bounds_of(Trace.of(requests, "two"), SMALL, config)
    assert [b.num_good for b in found.each] == [1, 1]


def test_a_small_kv_cache_lowers_the_bound_of_a_memory_bound_device() -> None:
    """Take steps that cost the same with any contents, so that only memory limits them."""
    flat = make_model(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1)
    requests = [TraceRequest(f"r{i}", 0.01 * i, 100, 50, SLO(2.0, 0.2)) for i in range(40)]
    trace = Trace.of(requests, "decodes")
    counts = [
        bounds_of(trace, flat, SimulationConfig(Limits(512, 64), num_blocks=n, block_size=1))
        for n in (40 * 150, 5 * 150)
    ]
    assert counts[0].tightest.num_good == 40
    assert counts[1].tightest.num_good <= 20


@pytest.mark.parametrize("attainment", [0.5, 0.9])
def test_no_policy_reaches_an_attainment_above_the_capacity_bound(attainment: float) -> None:
    requests = random_trace(7, most_requests=40).requests
    trace = Trace.of([replace(r, slo=SLO(4.0, 1.0)) for r in requests], "one promise")
    config = SimulationConfig(Limits(8))
    bound = capacity_bound(trace, SMALL, config, attainment)
    assert 0 < bound.rate < math.inf
    for factor in (1.02, 1.5, 3.0):
        faster = trace.scaled_to(bound.rate * factor)
        assert bounds_of(faster, SMALL, config).tightest.attainment < attainment
        for policy in POLICIES.values():
            done = simulate(faster, policy(), SMALL, config)
            rule = config.limits.deadline_rule
            good = sum(is_good(RequestRecord.from_request(r), rule) for r in done)
            assert good < attainment * len(trace), (factor, policy)


def test_a_capacity_bound_refuses_what_it_cannot_answer() -> None:
    trace = random_trace(4)
    for share in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"attainment must be a share in \(0, 1\]"):
            capacity_bound(trace, SMALL, attainment=share)
    at_once = Trace.of([replace(r, arrival_s=0.0) for r in trace.requests], "at once")
    with pytest.raises(ValueError, match="'at once' arrives in one instant"):
        capacity_bound(at_once, SMALL)
    hopeless = trace.with_slo(SLO(0.1, 9.0))
    assert capacity_bound(hopeless, SMALL).rate == 0.0


def test_a_longer_tpot_never_lowers_a_bound() -> None:
    limits = Limits(8)
    for seed in range(5):
        trace = random_trace(seed)
        looser = Trace(
            tuple(replace(r, slo=SLO(2 * r.slo.ttft_s, 2 * r.slo.tpot_s)) for r in trace.requests),
            "looser",
        )
        tight, loose = bounds(trace, SMALL, limits), bounds(looser, SMALL, limits)
        assert tight[0].num_good <= loose[0].num_good


@pytest.mark.skipif(not CONV.exists(), reason="needs ../shared/traces/azure_conv_2023.csv")
def test_azure_conv_is_bounded() -> None:
    trace = read_trace(CONV).head(1200).scaled_to(60.0).with_slo(SLO(1.0, 0.05))
    demand = demand_of(trace, load_model("h100/llama-3.1-8b"), Limits())
    l1, l2 = fluid_bound(demand), on_time_bound(demand)
    assert 0 < l2.num_good < l1.num_good <= len(trace) == l1.num_offered
    assert l2.attainment == l2.num_good / len(trace)
    assert l2.good_per_s == pytest.approx(60.0 * l2.attainment)


@pytest.mark.skipif(not CONV.exists(), reason="needs ../shared/traces")
def test_the_roofline_is_that_of_the_literature() -> None:
    """Compare with known values for an H200 with Llama-3.1-8B, at two operations a parameter."""
    of_file = {"azure_conv_2023.csv": 43.5, "azure_code_2023.csv": 27.9}
    of_file["mooncake_conversation.jsonl"] = 3.2
    exact = Roofline.of(MODELS["Llama-3.1-8B"], GPUS["H200"])
    rough = replace(exact, flops_per_token=2 * 8.03e9, flops_per_decode=0.0)
    for name, expected in of_file.items():
        trace = read_trace(CONV.with_name(name)).with_slo(SLO(1000.0, 0.05))
        assert roofline_bound(trace, rough, Limits()).sustained_per_s == pytest.approx(
            expected, rel=0.02
        )
        # Ours has fewer operations: embeddings are looked up, prompt tokens need no language head.
        sustained = roofline_bound(trace, exact, Limits(), 846_000).sustained_per_s
        assert expected < sustained < 1.2 * expected


@pytest.mark.parametrize("name", ["h200/llama-3.1-8b", "h100/llama-3.1-70b-tp4"])
def test_no_step_of_a_measured_model_beats_the_roofline(name: str) -> None:
    model = load_model(name)
    roofline = roofline_of(model.provenance)
    assert roofline is not None
    rng = np.random.default_rng(3)
    for _ in range(500):
        shape = BatchShape()
        for _ in range(int(rng.integers(1, 65))):
            new = int(rng.choice([1, 1, 1, 100, 1000]))
            shape.add(new, int(rng.integers(0, 4000)))
        physics_s = roofline.predict(shape)
        assert physics_s <= model.predict(shape), shape
        for arithmetic in (1.0, 0.75, 0.5, 0.0):
            cost_s = roofline.prices(arithmetic, shape.decode_context_tokens or 1).cost_s(shape)
            assert cost_s <= physics_s * (1 + 1e-12)


def test_a_roofline_is_not_guessed() -> None:
    known = {"gpu": "NVIDIA H200", "model": "meta-llama/Llama-3.1-8B", "engine": "vLLM, bfloat16"}
    assert roofline_of(known) is not None
    for key, value in (("gpu", "Mi300"), ("model", "a/b"), ("engine", "vLLM, fp8")):
        assert roofline_of(known | {key: value}) is None
    assert [b.name for b in bounds_of(random_trace(1), SMALL).each] == [
        "L1 fluid",
        "L2 on-time count",
    ]


@given(
    st.lists(
        st.tuples(
            st.floats(0, 4),
            st.integers(1, 8),
            st.integers(1, 8),
            st.floats(0.7, 8),
            st.floats(0.3, 2),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from(DeadlineRule),
    st.sampled_from(sorted(POLICIES)),
    st.integers(8, 40),
)
@settings(max_examples=25, deadline=None)
def test_mixed_promises_and_little_memory_break_no_bound(
    rows: list[tuple[float, int, int, float, float]],
    rule: DeadlineRule,
    policy: str,
    kv_tokens: int,
) -> None:
    requests = [
        TraceRequest(f"r{i}", at, p, o, SLO(ttft, tpot))
        for i, (at, p, o, ttft, tpot) in enumerate(rows)
    ]
    trace = Trace.of(requests, "mixed")
    config = SimulationConfig(Limits(8, 3, deadline_rule=rule), num_blocks=kv_tokens, block_size=1)
    done = simulate(trace, POLICIES[policy](), SMALL, config)
    good = sum(is_good(RequestRecord.from_request(r), rule) for r in done)
    for bound in bounds_of(trace, SMALL, config, hindsight=True).each:
        assert good <= bound.num_good, bound.name


def test_hindsight_is_tighter_where_every_token_has_its_own_due_time() -> None:
    stream = TraceRequest("stream", 0.0, 1, 12, SLO(1.5, 1.0))
    prompt = TraceRequest("prompt", 0.0, 8, 1, SLO(4.3, 1.0))
    trace = Trace.of([stream, prompt], "a prompt that needs all the time of some tokens")
    counts = {}
    for rule in (DeadlineRule.ENVELOPE, DeadlineRule.MEAN_TPOT):
        limits = Limits(8, 4, deadline_rule=rule)
        counts[rule] = [bound.num_good for bound in bounds(trace, SMALL, limits)]
    assert counts == {DeadlineRule.ENVELOPE: [2, 2, 1], DeadlineRule.MEAN_TPOT: [2, 2, 2]}


def test_parts_of_a_trace_bound_the_whole() -> None:
    trace = random_trace(11, most_requests=30)
    whole, parts = (hindsight_bound(trace, SMALL, Limits(8), num_requests=n) for n in (99, 4))
    assert whole.num_good <= parts.num_good <= len(trace)


@pytest.mark.parametrize("gap_s", [1e7, 1e15])
def test_days_without_requests_cost_hindsight_nothing(gap_s: float) -> None:
    slo = SLO(8.0, 2.0)
    crowd = [TraceRequest(f"r{i}", 0.0, 8, 4, slo) for i in range(6)]
    later = [replace(r, request_id=f"{r.request_id} later", arrival_s=gap_s) for r in crowd]
    alone = hindsight_bound(Trace.of(crowd, "now"), SMALL, Limits(8))
    both = hindsight_bound(Trace.of([*crowd, *later], "now and later"), SMALL, Limits(8))
    assert 0 < alone.num_good < len(crowd)
    assert both.num_good - 2 * alone.num_good in (0, 1), "each is rounded down"


def test_a_request_that_is_never_due_does_not_make_slots_narrow() -> None:
    """One that came behind the last due time made a million of them, for 20 minutes and more."""
    slos = (SLO(0.03, 0.006), SLO(math.inf, 0.006))
    requests = [TraceRequest(f"r{i}", 2.0 * i, 20, 1, slo) for i, slo in enumerate(slos)]
    demand = demand_of(Trace.of(requests, "late"), load_model("h100/llama-3.1-8b"), Limits())
    start_s = time.monotonic()
    assert on_time_bound(demand).num_good == 2
    assert time.monotonic() - start_s < 10.0
