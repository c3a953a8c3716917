"""Chunks and order of prompts while KV blocks are short, with times added up by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scored import num_good
from views import R, flat_model, view_of

from slosched.core import SLO, BatchShape, Limits, SchedulerView
from slosched.perfmodel import LinearModel, load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.memory import (
    are_few,
    has_time_for_freed,
    lacks_blocks,
    tokens_at_leisure,
    tokens_freed,
    tokens_in_turn,
)
from slosched.policy.kit.pace import Pace, stay_tokens
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Supply
from slosched.policy.kit.shortage import Shortage
from slosched.simulator.decodes import GroupedDecodes
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.slo import Tiers


class Hidden(LinearModel):
    """A model in which memory traffic hides up to 200 prompt tokens of a step at half their time."""

    def predict(self, shape: BatchShape) -> float:
        num_prompt_tokens = shape.num_tokens - shape.num_decodes
        return super().predict(shape) - min(200, num_prompt_tokens) * 25e-6


HIDDEN = Hidden(flat_model().coefficients)
"""5 ms + 50 us a token, but 25 us for each of the first 200 prompt tokens."""
LIMITS = Limits(max_num_batched_tokens=1000, max_num_seqs=100)


def full_view(*requests: R, num_blocks: int) -> SchedulerView:
    return view_of(requests, HIDDEN, limits=LIMITS, num_blocks=num_blocks)


def pace_of(view: SchedulerView) -> Pace:
    return Pace.of([r for r in view.running if r.is_decode], HIDDEN, view.now_s)


def test_a_decode_stays_for_twice_what_it_has_emitted() -> None:
    decodes = [R("a", 11, 1.0, out=10).request(), R("b", 31, 1.0, out=30).request()]
    assert stay_tokens(decodes) == 40
    assert stay_tokens([]) == 0


def test_a_step_takes_about_the_tokens_that_decodes_free_while_blocks_are_few() -> None:
    # Stays of 40 tokens; a cache of 8,000 is freed at 200 tokens a step, of which 1.5 are taken.
    decodes = R("a", 3990, 1.0, out=20), R("b", 3990, 1.0, out=20)
    view = full_view(*decodes, R("prompt", 500, 9.0), num_blocks=8000)
    assert tokens_in_turn(pace_of(view), view.running, 0, view) == 300


def test_of_free_blocks_a_step_takes_an_eighth() -> None:
    # 300 tokens as before, and 160 of the 1,280 that are free: else they would stay so while prompts
    # wait, if decodes stay for less time than they are thought to.
    decodes = R("a", 3990, 1.0, out=20), R("b", 3990, 1.0, out=20)
    view = full_view(*decodes, R("prompt", 500, 9.0), num_blocks=8000)
    block_size = view.kv.block_size
    assert tokens_in_turn(pace_of(view), view.running, 1280 // block_size, view) == 300 + 160
    assert tokens_in_turn(pace_of(view), view.running, 8000 // block_size, view) is None


def test_a_step_takes_no_fewer_tokens_than_a_cheap_chunk_has() -> None:
    # Decodes that stay for 2,000 tokens free 4 a step.  Of 64, 128, 256, 512 and 998 tokens 64 and
    # 128 take 25 us each, 256 take (200 · 25 + 56 · 50) / 256 = 30.5.
    decodes = R("a", 3990, 1.0, out=1000), R("b", 3990, 1.0, out=1000)
    view = full_view(*decodes, R("prompt", 500, 9.0), num_blocks=8000)
    assert tokens_in_turn(pace_of(view), view.running, 0, view) == 128


def test_memory_limits_no_step_that_holds_fewer_tokens_anyway() -> None:
    # Stays of 10 tokens: 8,000 · 1.5 / 10 = 1,200 tokens a step.
    view = full_view(R("a", 90, 1.0, out=5), R("prompt", 500, 9.0), num_blocks=8000)
    assert tokens_in_turn(pace_of(view), view.running, 0, view) is None


def test_time_is_scarcer_than_blocks_if_a_step_has_none_for_what_decodes_free() -> None:
    """Stays of 40 tokens free 200 tokens of 8,000 a step; beside two decodes they take about 10.9 ms."""
    decodes = R("a", 3990, 1.0, out=20), R("b", 3990, 1.0, out=20)
    view = full_view(*decodes, num_blocks=8000)
    assert tokens_freed(40.0, view.kv) == 200
    assert has_time_for_freed(pace_of(view), 0.0112, 40.0, view)
    assert not has_time_for_freed(pace_of(view), 0.0106, 40.0, view)
    assert not has_time_for_freed(pace_of(view), 0.0051, 4000.0, view), "no time for any"


def test_blocks_are_lacking_if_they_do_not_hold_the_prompts() -> None:
    prompts = [(R("prompt", 500, 9.0).request(), 1.0)]
    view = full_view(num_blocks=1000)
    assert lacks_blocks(prompts, 499, view)
    assert not lacks_blocks(prompts, 500, view)


def test_blocks_are_few_if_eight_full_steps_would_take_them() -> None:
    view = full_view(num_blocks=16_000)
    assert are_few(7999, view)
    assert not are_few(8000, view)


def test_prompts_that_have_time_are_spread_once_the_cache_fills() -> None:
    decode, prompt = R("a", 3000, 1.0, out=20), R("prompt", 600, 9.0)
    supply = Supply(0.0)

    def spread(num_blocks: int, deadline_s: float) -> int | None:
        view = full_view(decode, prompt, num_blocks=num_blocks)
        view.waiting[0].deadline_s = deadline_s
        alone_s = HIDDEN.predict_prefill(600)
        return tokens_at_leisure(pace_of(view), [(view.waiting[0], alone_s)], supply, 0.0, view)

    assert spread(7190, 9.0) == 128  # 3,591 of 7,190 blocks would be free
    assert spread(7210, 9.0) is None  # more than a half would be
    # Alone, a full step takes 50 us a token, and the prompt 30 ms of those.  A step with 128 tokens
    # takes 8.25 ms, one with 256 12.9 and one with 512 25.7: 64, 50 and 50 us a token, twice.
    assert spread(7190, 0.081) == 128
    assert spread(7190, 0.05) is None


def test_a_step_that_spreads_prompts_says_that_it_had_time() -> None:
    def plan(num_blocks: int) -> tuple[int, bool]:
        view = full_view(R("a", 3000, 9.0, out=20), R("prompt", 600, 9.0), num_blocks=num_blocks)
        output = Goodput().schedule(view)
        return output.num_scheduled_tokens["prompt"], output.is_at_leisure

    num_tokens, is_at_leisure = plan(7190)
    assert 0 < num_tokens <= 128
    assert is_at_leisure
    assert plan(9000) == (600, False)


@pytest.mark.parametrize("num_blocks", [6_050, 7_500, 13_000, 20_000])
@pytest.mark.parametrize("due_s", [0.01, 0.05, 9.0])
def test_a_step_without_a_seat_says_so_for_a_group_of_decodes_as_for_each(
    num_blocks: int, due_s: float
) -> None:
    decodes = [R(f"d{i}", 3000, 9.0, out=20) for i in range(2)]
    view = full_view(*decodes, R("prompt", 600, due_s), num_blocks=num_blocks)
    view = replace(view, limits=replace(LIMITS, max_num_seqs=2))
    group = GroupedDecodes(view.kv, LIMITS.deadline_rule)
    for request in view.running:
        request.token_times_s = [0.0] * request.num_output_tokens
        group.join(request, num_tokens_left=5)
    beside = Goodput().schedule_beside(group, replace(view, running=()))
    assert beside is not None
    is_at_leisure = due_s == 9.0 and num_blocks in (7_500, 13_000)
    assert beside.is_at_leisure == Goodput().schedule(view).is_at_leisure == is_at_leisure


def test_prompts_go_by_length_while_more_arrive_than_the_cache_holds() -> None:
    """3,810 tokens arrive in a second, in which 800 steps of 5.1 ms free 7,298 / (800 · 5.1 ms)."""
    decodes = [R(f"d{i}", 3100, 9.0, out=400, tpot_s=0.04) for i in range(2)]
    prompts = [R(f"p{i}", 200 - i, 1.0 + i / 100, arrival_s=i / 20 - 1) for i in range(20)]

    def first(prompts: list[R], num_free: int) -> str:
        view = view_of([*decodes, *prompts], HIDDEN, limits=LIMITS, num_blocks=6198 + num_free)
        policy = Goodput()
        policy._arrivals.stays.watch(view.running)
        return next(n for n in policy.schedule(view).num_scheduled_tokens if n.startswith("p"))

    assert first(prompts, 5000) == "p0"  # all fit
    assert first(prompts, 1100) == "p19"
    assert first(prompts[:10], 550) == "p0"  # so few arrivals do not tell of a flood


def test_a_small_cache_serves_more_when_it_is_filled_no_faster_than_it_is_emptied() -> None:
    """In a fourteenth of an H100's cache, against the same policy that thinks of time alone."""

    class BlindToMemory(Goodput):
        def spread(self, *_: object) -> None:
            pass

        def take_freed(self, shortage: Shortage, pack: PromptPack) -> bool:
            return False

    trace = synthesize("azure_conv", num_requests=900, seed=7).scaled_to(20.0)
    trace = trace.with_slo(Tiers((SLO(2.0, 0.05),), (1.0,)))
    config = SimulationConfig(Limits(), num_blocks=2000)
    model = load_model("h100/llama-3.1-8b")
    ours = num_good(Goodput(), trace, model, config)
    assert ours > 1.1 * num_good(BlindToMemory(), trace, model, config)
