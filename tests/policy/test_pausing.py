"""Decodes that are ahead lend their KV blocks, with times added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from scored import num_good
from views import R, decode, flat_model, view_of

from slosched.batch import BatchBuilder
from slosched.core import SLO, DeadlineRule, EndReason, Limits, Request, SchedulerView
from slosched.perfmodel import load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.arrivals import Arrivals
from slosched.policy.kit.flood import Flood
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.pausing import (
    in_turn_for_blocks,
    is_flooded,
    least_urgent_last,
    tokens_per_s_beside,
)
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Order
from slosched.policy.kit.stays import Stays
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.slo import Tiers

MODEL = flat_model()
"""5 ms + 50 us a token."""


def seen(
    *requests: R | Request,
    rule: DeadlineRule = DeadlineRule.MEAN_TPOT,
    num_blocks: int = 1000,
) -> SchedulerView:
    return view_of(requests, MODEL, limits=Limits(deadline_rule=rule), num_blocks=num_blocks)


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("mean_tpot", ["late", "near", "soon", "far"]),
        ("envelope", ["near", "soon", "far", "late"]),  # a late token is lost there
        ("tbt", ["far", "late", "near", "soon"]),  # in order of admission
    ],
)
def test_who_is_furthest_ahead_gives_up_its_blocks_first(rule: str, names: list[str]) -> None:
    slacks_ms = {"far": 900, "late": -9, "near": 5, "soon": 90}
    decodes = [decode(name, 100, slack_ms) for name, slack_ms in slacks_ms.items()]
    view = seen(*decodes, rule=DeadlineRule(rule))
    assert [r.request_id for r in least_urgent_last(view)] == names


def test_a_decode_that_lacks_a_block_takes_those_of_the_one_that_is_furthest_ahead() -> None:
    """Three decodes hold all nine blocks of one token, and each needs one more."""
    decodes = [R("ahead", 4, 2.0, out=1), R("next", 4, 0.03, out=1), R("last", 4, 0.04, out=1)]
    output = Goodput().schedule(seen(*decodes, num_blocks=9))
    assert output.preempted == ("ahead",)
    assert set(output.num_scheduled_tokens) == {"next", "last"}


def test_the_mean_stay_counts_the_tokens_of_requests_that_go_on() -> None:
    stays, requests = Stays(), [R(f"d{i}", 11, 1.0, out=10).request() for i in range(4)]
    stays.watch(requests[:3])
    assert stays.mean_tokens(1.0) == 30  # as if one had ended
    requests[0].end_reason, requests[0].end_s = EndReason.STOP, 1.5
    stays.watch(requests[3:])
    assert stays.mean_tokens(2.0) == 20
    requests[1].num_output_tokens = 90
    assert (stays.mean_tokens(2.0), stays.mean_tokens(3.0)) == (20, 60)


def test_the_mean_stay_does_not_depend_on_when_it_was_asked_for() -> None:
    """One `Stays` is asked after each of many ends, the other only after the last."""
    often, once = Stays(), Stays()
    requests = [R(f"d{i}", 301, 1.0, out=1 + i).request() for i in range(200)]
    for stays in (often, once):
        stays.watch(requests)
    for i in (i for start in range(7) for i in range(start, 150, 7)):
        requests[i].end_reason, requests[i].end_s = EndReason.STOP, 1000.0 * (i % 7) + i
        often.mean_tokens(requests[i].end_s)
    assert often.mean_tokens(1e4) == once.mean_tokens(1e4)


def test_a_rejected_request_tells_nothing_of_stays() -> None:
    stays, rejected = Stays(), R("rejected", 11, 1.0).request()
    rejected.end_reason, rejected.end_s = EndReason.EXPIRED, 0.5
    stays.watch([R("decode", 11, 1.0, out=10).request(), rejected])
    assert stays.mean_tokens(1.0) == 10


def test_ended_requests_are_forgotten_though_nobody_asks() -> None:
    stays = Stays()
    for i in range(20_000):
        request = R(f"r{i}", 11, 1.0, out=10).request()
        request.end_reason, request.end_s = EndReason.STOP, float(i)
        stays.watch([request])
    kept = [
        r for r in (*stays._watched.values(), *stays._latest.values()) if isinstance(r, Request)
    ]
    assert len(kept) < 200, "each holds its prompt, which may be long"


def test_what_the_latest_emitted_counts_after_they_are_forgotten() -> None:
    stays, requests = Stays(), [R(f"d{i}", 11, 1.0, out=10).request() for i in range(20)]
    stays.watch(requests)
    for i, request in enumerate(requests[:16]):
        request.end_reason, request.end_s = EndReason.STOP, float(i)
    before = stays.mean_of_latest(), stays.lengths()
    stays.mean_tokens(20.0)
    assert (stays.mean_of_latest(), stays.lengths()) == before == (12.5, [10] * 16)


def test_a_cache_is_flooded_by_more_prompt_tokens_than_decodes_free() -> None:
    """Stays of 100 steps of 5.1 ms free 1,000 tokens in 0.51 s, 1,961 in a second; 1.5 times that
    is 2,941."""
    view = seen(R("a", 11, 1.0, out=1), R("b", 11, 1.0, out=1))
    pace = Pace.of(view.running, MODEL, 0.0)
    assert is_flooded(2950, 100, pace, view)
    assert not is_flooded(2930, 100, pace, view)


def test_prompts_have_the_time_that_decodes_leave_at_the_pace_they_ask_for() -> None:
    """2,048 tokens take 107.4 ms.  Two decodes take 5.1 ms 20 times a second, which leaves 89.8 % of
    the device.  However often they run, a tenth is left."""
    view = seen(R("a", 11, 1.0, out=1), R("b", 11, 1.0, out=1))
    view = replace(view, limits=Limits(max_num_batched_tokens=2048))
    pace = replace(Pace.of(view.running, MODEL, 0.0), steps_per_s=20.0)
    assert tokens_per_s_beside(pace, view, 0.1) == pytest.approx(0.898 * 2048 / 0.1074)
    pace = replace(pace, steps_per_s=200.0)
    assert tokens_per_s_beside(pace, view, 0.1) == pytest.approx(0.1 * 2048 / 0.1074)


@pytest.mark.parametrize(("tpots_s", "is_short"), [((0.05, 0.1), False), ((0.1,) * 3, True)])
def test_prompts_without_time_make_a_cache_short_only_if_promises_are_alike(
    tpots_s: tuple[float, ...], is_short: bool
) -> None:
    """A million tokens come in a second, and 1,500 would flood the cache within a step of 5.1 ms.
    In steps of 16 tokens there is time for fewer than 3,000 in a second."""

    class Rush(Arrivals):
        def tokens_per_s(self, now_s: float) -> float:
            return 1e6

    arrivals = Rush()
    arrivals.see(
        [R(f"seen {i}", 11, 1.0, tpot_s=tpot_s).request() for i, tpot_s in enumerate(tpots_s)]
    )
    view = seen(R("a", 11, 1.0, out=1), R("b", 11, 1.0, out=1))
    view = replace(view, limits=Limits(max_num_batched_tokens=16))
    pace = Pace.of(view.running, MODEL, 0.0)
    pack = PromptPack(BatchBuilder(view), 0.0, ())
    size = 2 * view.kv.num_blocks * view.kv.block_size
    prompts = [(R("long", size, 9.0).request(), 1.0)]
    assert is_flooded(1e6, 1.0, pace, view)
    assert Flood(arrivals, 0.1).is_short_of_blocks(pace, prompts, pack, view) == is_short


@pytest.mark.parametrize(
    ("num_paused", "num_free", "may"), [(5, 0, True), (6, 0, False), (5, 60, False)]
)
def test_long_prompts_start_in_a_flood_while_few_requests_are_paused(
    num_paused: int, num_free: int, may: bool
) -> None:
    """Half of the cache holds 50 tokens, ten for each paused request; more of it is filled."""

    class Rush(Arrivals):
        def tokens_per_s(self, now_s: float) -> float:
            return 1e6

    paused = [R(f"paused {i}", 10, 1.0).request() for i in range(num_paused)]
    for request in paused:
        request.num_prompt_tokens, request.num_output_tokens = 9, 1
    view = view_of(
        [R("a", 100 - num_free, 1.0, out=1), *paused], MODEL, num_blocks=100, block_size=1
    )
    pace = Pace.of(view.running, MODEL, 0.0)
    assert Flood(Rush(), 0.1).may_long_start(pace, view) == may


def in_turn(prompts: Sequence[R], num_resumed: int) -> list[str]:
    """Return the names in turn; the first of `prompts` have emitted a token and were paused."""
    timed = [(p.request(), MODEL.predict_prefill(p.tokens)) for p in prompts]
    for request, _ in timed[:num_resumed]:
        request.num_output_tokens = 1
    order = Order([request for request, _ in timed], [])
    pace = Pace.of(seen(R("decode", 11, 1.0, out=1)).running, MODEL, 0.0)
    view = seen(*[request for request, _ in timed])
    return [r.request_id for r in in_turn_for_blocks(order, timed, pace, view, fairness=0.0)]


def test_paused_requests_wait_for_new_ones_until_they_are_due() -> None:
    """100 tokens take 10 ms, twice that and eight steps of 5.05 ms are 60.4."""
    prompts = [R("due", 100, 0.060), R("has time", 100, 0.061), R("long", 900, 0.7)]
    assert in_turn([*prompts, R("short", 90, 0.9)], 2) == ["due", "short", "long", "has time"]


def test_in_a_flood_a_small_cache_serves_more_prompts_by_length_than_by_deadline() -> None:
    """A sixteenth of an H100's cache, at twice the rate that it holds."""

    class WithoutAnOrder(Flood):
        def in_turn(self, order: Order, *_: object) -> list[Request]:
            return [*order.in_time, *order.late]

    class ByDeadline(Goodput):
        def reset(self) -> None:
            super().reset()
            self._flood = WithoutAnOrder(self._arrivals, self.min_share)

    trace = synthesize("azure_conv", num_requests=600, seed=3).scaled_to(40.0)
    trace = trace.with_slo(Tiers((SLO(5.0, 0.1),), (1.0,)))
    config = SimulationConfig(Limits(), num_blocks=1700)
    model = load_model("h100/llama-3.1-8b")
    ours = num_good(Goodput(), trace, model, config)
    assert ours > num_good(ByDeadline(), trace, model, config) + 30
