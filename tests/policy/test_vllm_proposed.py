"""The proposals to vLLM, in small cases that were worked out by hand from their texts and code."""

from __future__ import annotations

import pytest
from replica import Replica
from views import R, view_of

from slosched import SimulationConfig, Trace, TraceRequest, simulate
from slosched.core import NO_SLO, Limits, Policy
from slosched.kv import PrefixCaching
from slosched.perfmodel import load_model
from slosched.policy import (
    VLLMPPAS,
    VLLMSLO,
    VLLMV1,
    VLLMCostAware,
    VLLMLeastComputedFirst,
    VLLMResidualSJF,
)
from slosched.policy.spec import PolicySpecError, make_policy

MODEL = load_model("h100/llama-3.1-8b")


def first_victims(policy: Policy, num_blocks: int, *arrivals: tuple[str, int, int]) -> list[str]:
    """Return whom the first preempting step preempts, and whom it serves."""
    replica = Replica(policy, tokens=64, num_blocks=num_blocks)
    replica.add(*arrivals)
    for _ in range(20):
        served = replica.step()
        if replica.preempted:
            return [*replica.preempted, *served]
    raise AssertionError("nobody was preempted")


@pytest.mark.parametrize(
    ("policy", "victims"), [(VLLMV1(), ["large", "small"]), (VLLMLeastComputedFirst(), ["small"])]
)
def test_least_computed_first_preempts_who_loses_least(policy: Policy, victims: list[str]) -> None:
    """`small` needs a second block first, while `large` is younger and has 9 computed tokens."""
    assert first_victims(policy, 4, ("small", 3, 9), ("large", 8, 8)) == victims


def test_least_computed_first_takes_back_what_its_victim_got_in_this_step() -> None:
    victims = first_victims(VLLMLeastComputedFirst(), 3, ("small", 2, 9), ("large", 8, 4))
    assert victims == ["small", "large"]


def test_least_computed_first_is_independent_of_the_order_of_the_queue() -> None:
    replica = Replica(make_policy("vllm_lcf:policy=priority"), tokens=64, seats=1)
    replica.add(("a", 4, 3, 5), ("b", 4, 3, 1))
    assert replica.step() == {"b": 4}


def test_cost_aware_keeps_who_has_little_left_to_emit() -> None:
    """Of 9 tokens in 2 blocks each, `ending` has emitted 2 of 3, and `begun` 2 of 9."""
    arrivals = (("begun", 7, 9), ("ending", 7, 3))
    assert first_victims(VLLMCostAware(), 4, *arrivals)[0] == "begun"
    assert first_victims(VLLMV1(), 4, *arrivals)[0] == "ending"


def test_cost_aware_prefers_many_blocks_for_few_tokens() -> None:
    """`few` scores 2/9 · (1 - 4/20) = 0.178, and `many`, which frees more, 5/20 · 8/12 = 0.167."""
    arrivals = (("few", 5, 20), ("many", 16, 12))
    assert first_victims(VLLMCostAware(), 7, *arrivals)[0] == "few"
    assert first_victims(VLLMV1(), 7, *arrivals)[0] == "many"


def test_p_pas_caps_prompts_only_while_several_of_them_and_a_decode_compete() -> None:
    replica = Replica(VLLMPPAS(capped_tokens=8), tokens=64)
    replica.add(("a", 30, 9), ("b", 10, 9))
    assert replica.step() == {"a": 30, "b": 10}  # no decode runs
    replica.add(("c", 40, 9))
    assert replica.step() == {"a": 1, "b": 1, "c": 40}  # one prompt is no pressure
    replica.add(("d", 11, 9), ("e", 9, 9))
    decodes = {"a": 1, "b": 1, "c": 1}
    assert replica.step() == {**decodes, "d": 8}
    assert replica.step() == {**decodes, "d": 3, "e": 5}  # the cap is for all prompts together
    assert replica.step() == {**decodes, "d": 1, "e": 4}  # and `e` is alone again


def test_p_pas_is_vllm_with_a_cap_of_the_whole_step() -> None:
    arrivals = (("a", 30, 4), ("b", 40, 4), ("c", 9, 4), ("d", 50, 4))
    plans = []
    for policy in (VLLMPPAS(capped_tokens=64), VLLMV1()):
        replica = Replica(policy, tokens=64, num_blocks=30)
        replica.add(*arrivals)
        plans.append(replica.steps(9))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("cache_aware", [True, False])
def test_residual_sjf_starts_a_long_prompt_that_is_cached_first(cache_aware: bool) -> None:
    """The example of the PR's tests: 33 tokens of which 32 are cached, against 18 new ones."""
    known, other = (1, 2), (3,)
    requests = [
        TraceRequest("warm", 0.0, 33, 500, NO_SLO, prefix_hashes=known),
        TraceRequest("cold", 0.1, 18, 1, NO_SLO, prefix_hashes=other),
        TraceRequest("cached", 0.2, 33, 1, NO_SLO, prefix_hashes=known),
    ]
    trace = Trace.of(requests, "three", prefix_block_tokens=16)
    config = SimulationConfig(Limits(max_num_seqs=1), prefix_cache=PrefixCaching.HASH)
    policy = VLLMResidualSJF(cache_aware=cache_aware)
    ends = {r.request_id: r.end_s for r in simulate(trace, policy, MODEL, config)}
    assert ends["cold"] is not None
    assert ends["cached"] is not None
    assert (ends["cached"] < ends["cold"]) == cache_aware


def test_residual_sjf_lets_who_waited_long_go_first_and_counts_whole_blocks() -> None:
    policy = VLLMResidualSJF(max_wait_s=5)
    waiting = [
        R("new", 30, 99, arrival_s=9),
        R("longer", 33, 99, arrival_s=6),
        R("similar", 31, 99, arrival_s=7),
        R("aged", 500, 99, arrival_s=4),
        R("older", 900, 99, arrival_s=3),
    ]
    view = view_of(waiting, now_s=9.5, block_size=16)
    order = [r.request_id for r in policy.waiting_in_order(view)]
    assert order == ["older", "aged", "similar", "new", "longer"]
    view.waiting[0].num_preemptions = 1
    assert next(iter(policy.waiting_in_order(view))).request_id == "new"


@pytest.mark.parametrize(
    ("bias", "short_s", "long_s"),
    [(0, 20, 20), (0.5, 20, 30), (1, 20, 40), (5.5, 30, 80), (10, 40, 120), (-10, 120, 40)],
)
def test_slo_has_two_targets_that_move_apart_with_the_bias(
    bias: float, short_s: float, long_s: float
) -> None:
    policy = VLLMSLO(priority_bias=bias)
    assert policy.target_s(2048) == pytest.approx(short_s)
    assert policy.target_s(2049) == pytest.approx(long_s)


@pytest.mark.parametrize(("bias", "first"), [(0, "long"), (10, "short")])
def test_slo_starts_whose_target_is_nearer(bias: float, first: str) -> None:
    """Of 40 s, the short one has waited 1 s; the long one 2 s, of 20 s or of 120 s."""
    policy = VLLMSLO(priority_bias=bias)
    view = view_of([R("long", 9000, 99), R("short", 100, 99, arrival_s=1)], now_s=2)
    assert next(iter(policy.waiting_in_order(view))).request_id == first


@pytest.mark.parametrize(("now_s", "kept"), [(11.9, 0), (12, 10)])
def test_slo_keeps_tokens_for_who_waited_for_most_of_its_target(now_s: float, kept: int) -> None:
    view = view_of(
        [R("running", 900, 99, done=100), R("waiting", 50, 99)],
        now_s=now_s,
        limits=Limits(max_num_batched_tokens=100),
    )
    plan = VLLMSLO().schedule(view).num_scheduled_tokens
    assert plan == {"running": 100 - kept, **({"waiting": kept} if kept else {})}


def test_slo_keeps_nothing_while_most_decode() -> None:
    decodes = [R(name, 100, 99, out=3) for name in "ab"]
    view = view_of(
        [*decodes, R("running", 900, 99, done=100), R("waiting", 50, 99)],
        now_s=15,
        limits=Limits(max_num_batched_tokens=100),
    )
    assert VLLMSLO().schedule(view).num_scheduled_tokens["running"] == 98


@pytest.mark.parametrize(
    "spec",
    [
        "vllm_ppas:capped_tokens=0",
        "vllm_residual_sjf:max_wait_s=0",
        "vllm_residual_sjf:policy=priority",
        "vllm_slo:priority_bias=11",
        "vllm_slo:waiting_token_reserve_ratio=2",
    ],
)
def test_bad_options_are_refused(spec: str) -> None:
    with pytest.raises(PolicySpecError):
        make_policy(spec)
