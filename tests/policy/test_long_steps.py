"""What chunks cost beside decodes, and steps longer than a TPOT, with times added up by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from scored import num_good
from views import R, decode, flat_model, prompt, view_of

from slosched.core import SLO, BatchShape, DeadlineRule, Limits
from slosched.perfmodel import LinearModel
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.chunks import (
    chunk_beside,
    chunks_beside,
    in_a_tpot,
    in_chunks_like,
    in_full_steps,
    largest_within,
)
from slosched.policy.kit.long_steps import long_steps, tokens_per_s_in_turns
from slosched.policy.kit.pace import Pace
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import synthesize
from slosched.workload.slo import Tiers

PROPORTIONAL = flat_model()
"""5 ms + 50 us a token."""


class Experts(LinearModel):
    """A model in which any prompt in a step adds 30 ms: it brings in all experts' weights."""

    def predict(self, shape: BatchShape) -> float:
        return super().predict(shape) + (0.030 if shape.num_prefills else 0.0)

    def predict_prefill(self, num_new_tokens: int, num_prior_tokens: int = 0) -> float:
        return super().predict_prefill(num_new_tokens, num_prior_tokens) + 0.030


EXPERTS = Experts(flat_model(10e-3, 10e-6).coefficients)
"""10 ms + 10 us a token, + 30 ms for prompts: a decode takes 10.01 ms, 1,000 tokens beside it
50.01."""

LIMITS = Limits(max_num_batched_tokens=1001, max_num_seqs=100)


def pace_of(*requests: R, model: LinearModel = EXPERTS) -> Pace:
    return Pace.of(view_of(requests).running, model, 0.0)


def tokens_of(*requests: R, limits: Limits = LIMITS) -> dict[str, int]:
    return dict(Goodput().schedule(view_of(requests, EXPERTS, limits=limits)).num_scheduled_tokens)


def test_a_token_costs_what_it_adds_to_the_step() -> None:
    decodes = pace_of(R("decode", 11, 0.1, out=1)).shape
    chunk = chunk_beside(EXPERTS, decodes, 0.01001, 100)
    assert (chunk.num_tokens, chunk.step_s) == (100, pytest.approx(0.04101))
    assert chunk.token_s == pytest.approx(0.031 / 100)


def test_the_largest_chunk_within_a_limit_is_found_between_the_lengths_that_were_asked_for() -> (
    None
):
    """5.05 ms of the decode leave 4.95 of 10 ms: 99 tokens of 50 us, between 64 and 128."""
    decodes = pace_of(R("decode", 11, 0.1, out=1), model=PROPORTIONAL).shape
    chunks = chunks_beside(PROPORTIONAL, decodes, 0.00505, 1000)
    assert [chunk.num_tokens for chunk in chunks] == [64, 128, 256, 512, 1000]
    within = largest_within(chunks, 0.00505, 0.010)
    assert within is not None
    assert (within.num_tokens, within.token_s) == (pytest.approx(99), pytest.approx(50e-6))
    assert largest_within(chunks, 0.00505, 1.0) == chunks[-1]
    assert largest_within(chunks, 0.00505, 0.005) is None


def test_a_prompt_costs_what_its_tokens_add_to_steps_of_decodes() -> None:
    """100 tokens add 5 ms to any step, though alone they take 10.  Of 2,000 tokens, more than a
    step holds, each counts by its time alone: 105 ms are 1,909 times the 55 us of one in 1,000."""
    view = view_of([R("short", 100, 9.0), R("long", 2000, 9.0)])
    prompts = [(r, PROPORTIONAL.predict_prefill(r.num_prompt_tokens)) for r in view.waiting]
    pace = pace_of(R("decode", 11, 0.1, out=1), model=PROPORTIONAL)
    chunk = in_a_tpot(0.050, pace, PROPORTIONAL, 1000)
    assert chunk is not None
    costs = [s for _, s in in_chunks_like(chunk, prompts, PROPORTIONAL, 1000)]
    assert costs == pytest.approx([0.005, 0.105 / 55e-6 * 50e-6])


def test_steps_that_are_full_before_a_tpot_has_passed_take_all_their_time() -> None:
    """Steps of a decode and 1,000 tokens take 50.01 ms, so three fit into a TPOT of 150 ms.  The
    plan counts on 1,000 tokens in each of them, whatever decodes leave."""
    pace = pace_of(R("decode", 11, 0.1, tpot_s=0.150, out=1))
    for share in (0.5, 0.93):
        chunk = in_full_steps(0.150, pace, EXPERTS, 1001, share)
        assert chunk is not None
        assert (chunk.num_tokens, chunk.step_s) == (1000, pytest.approx(0.05001))
        assert share / chunk.token_s == pytest.approx(1000 / 0.05001)
    assert in_full_steps(0.050, pace, EXPERTS, 1001, 0.5) is None


def test_a_prompt_for_which_full_steps_leave_no_time_is_given_up() -> None:
    """1,900 tokens take two steps, of 50 and 49 ms, and the second ends after both are due.  Beside
    a decode they add 79 ms to 15 steps in 150 ms, but in full steps they would not be that cheap.
    """
    decode = R("decode", 11, 1.0, tpot_s=0.150, out=1)
    found = tokens_of(decode, R("long", 1000, 0.090), R("short", 900, 0.095))
    assert found["short"] == 900


def test_a_chunk_that_costs_nothing_makes_prompts_free() -> None:
    view = view_of([R("a", 100, 9.0)])
    chunk = chunk_beside(PROPORTIONAL, pace_of(R("decode", 11, 0.1, out=1)).shape, 1.0, 10)
    assert [s for _, s in in_chunks_like(chunk, [(view.waiting[0], 0.010)], EXPERTS, 100)] == [0.0]


def test_where_time_is_proportional_to_tokens_no_long_step_pays() -> None:
    for tpot_s in (0.010, 0.025, 0.050):
        pace = pace_of(R("decode", 11, 0.1, tpot_s=tpot_s, out=1), model=PROPORTIONAL)
        assert long_steps(pace, PROPORTIONAL, 1001, 0.1) is None


def test_where_the_first_token_is_dear_a_long_step_pays() -> None:
    """Steps of 45 ms hold 499 tokens, 11.1 a ms.  After a step of 1,000, 50.01 ms, the steps take
    44.1 on average if a decode adds 0.17 steps of 10.01: 1,000 in 51.7 ms are 19.3 a ms."""
    long = long_steps(pace_of(R("decode", 11, 0.1, tpot_s=0.045, out=1)), EXPERTS, 1001, 0.1)
    assert long is not None
    assert (long.tpot_s, long.chunk.num_tokens) == (0.045, 1000)
    roomy = pace_of(R("decode", 11, 0.1, tpot_s=0.055, out=1))
    assert long_steps(roomy, EXPERTS, 1001, 0.1) is None, "a whole chunk takes less than the TPOT"


def test_a_tpot_that_leaves_too_little_to_prompts_is_not_kept_by_long_steps() -> None:
    """With 10.3 ms a TPOT, decodes leave 0.8 % of the time, with 9 ms none."""
    relaxed = R("relaxed", 11, 0.1, tpot_s=0.045, out=1)
    for tpot_s in (0.009, 0.0103):
        pace = pace_of(R("hasty", 11, 0.1, tpot_s=tpot_s, out=1), relaxed)
        long = long_steps(pace, EXPERTS, 1002, 0.1)
        assert long is not None
        assert long.tpot_s == 0.045
    assert long_steps(pace_of(replace(relaxed, tpot_s=math.inf)), EXPERTS, 1001, 0.1) is None


def test_decodes_run_alone_until_all_are_ahead_by_a_long_step() -> None:
    """A step of 1,000 tokens takes 50.01 ms; a margin of 5 % of 45 ms is added."""
    long = R("long", 2000, 9.0)
    behind, ahead = (R("decode", 11, due, tpot_s=0.045, out=1) for due in (0.052, 0.053))
    assert tokens_of(behind, long) == {"decode": 1}
    assert tokens_of(ahead, long) == {"decode": 1, "long": 959}, "a whole number of tiles"


def test_a_short_prompt_waits_only_for_the_step_that_it_needs() -> None:
    """100 tokens take 41.01 ms, which is within the TPOT minus its margin, 42.75."""
    behind = R("decode", 11, 0.020, tpot_s=0.045, out=1)
    assert tokens_of(behind, R("short", 100, 9.0)) == {"decode": 1, "short": 100}


def test_a_decode_that_has_time_is_left_out_between_long_steps() -> None:
    """It is left out if it stays ahead by a long step, 50 ms and 2.25 of margin, until this one
    ends after 10 ms, and asks for at least 1.5 times the TPOT that steps keep."""
    hasty, long = R("hasty", 11, 0.020, tpot_s=0.045, out=1), R("long", 2000, 9.0)
    alone = {"hasty": 1}
    assert tokens_of(hasty, R("loose", 11, 0.063, tpot_s=0.2, out=1), long) == alone
    for due_s, tpot_s in ((0.061, 0.2), (0.063, 0.060)):
        other = R("loose", 11, due_s, tpot_s=tpot_s, out=1)
        assert tokens_of(hasty, other, long) == {"hasty": 1, "loose": 1}
    ahead = replace(hasty, due_s=0.055)
    with_prompt = tokens_of(ahead, R("loose", 11, 0.2, tpot_s=0.2, out=1), long)
    assert with_prompt.pop("long") > 900
    assert with_prompt == {"hasty": 1, "loose": 1}, "a long step holds all"


def test_between_long_steps_a_lost_decode_gets_a_token_as_often_as_the_largest_tpot_asks() -> None:
    """Its last token came 21 ms ago, and the step takes 10."""
    limits = replace(LIMITS, deadline_rule=DeadlineRule.ENVELOPE)
    hasty, long = R("hasty", 11, 0.020, tpot_s=0.045, out=1), prompt("long", 2000, 9000)
    lost = decode("lost", 11, -20, tpot_s=0.001)
    for tpot_s, gets_one in ((0.045, False), (0.030, True)):
        requests = [lost, replace(hasty, tpot_s=tpot_s), long]
        output = Goodput().schedule(view_of(requests, EXPERTS, limits=limits))
        assert ("lost" in output.num_scheduled_tokens) is gets_one


def test_a_tpot_is_kept_by_long_steps_if_only_those_who_ask_for_it_run_between_them() -> None:
    """A step of all 101 decodes takes 11.01 ms, which leaves nothing of 11 ms; one of those that
    are due within 11 ms, 12, takes 10.12."""
    hasty = R("hasty", 11, 0.1, tpot_s=0.011, out=1)
    loose = [R(f"loose{i}", 11, 0.1, tpot_s=0.1, out=1) for i in range(100)]
    found = long_steps(pace_of(hasty, *loose), EXPERTS, 1101, 0.05)
    assert found is not None
    assert found.tpot_s == 0.011
    assert found.between_s == pytest.approx(0.01012)


def test_a_decode_that_is_late_already_holds_no_long_step_up() -> None:
    late = R("late", 11, -0.1, tpot_s=0.045, out=1)
    ahead = R("ahead", 11, 0.060, tpot_s=0.045, out=1)
    assert tokens_of(late, ahead, R("long", 2000, 9.0))["long"] > 900


@pytest.mark.parametrize(("rule", "waits"), [("envelope", True), ("mean_tpot", False)])
def test_where_no_late_token_is_made_up_for_a_long_step_waits_for_who_is_nearly_due(
    rule: str, waits: bool
) -> None:
    """A step of all 41 decodes takes 10.41 ms, one of "nearly" alone 10.01.  It is due in 10.2."""
    limits = replace(LIMITS, deadline_rule=DeadlineRule(rule))
    nearly = R("nearly", 11, 0.0102, tpot_s=0.045, out=1)
    loose = [R(f"loose {i}", 11, 0.2, tpot_s=0.2, out=1) for i in range(40)]
    found = tokens_of(nearly, *loose, R("long", 2000, 9.0), limits=limits)
    assert (found == {"nearly": 1}) is waits
    assert ("long" in found) is not waits


def test_where_every_gap_counts_there_are_no_long_steps() -> None:
    limits = replace(LIMITS, deadline_rule=DeadlineRule.TBT)
    decode = R("decode", 11, 9.0, tpot_s=0.045, out=1)
    assert tokens_of(decode, R("long", 2000, 9.0), limits=limits)["long"] <= 499


def test_long_steps_keep_promises_that_steps_of_a_tpot_do_not() -> None:
    """On a device on which a tile of a prompt takes nearly all of a TPOT."""

    class WithoutLongSteps(Goodput):
        def long_steps(self, pace: Pace, view: object) -> None:
            return None

    trace = synthesize("poisson", num_requests=120, seed=1).scaled_to(14.0)
    trace = trace.with_slo(Tiers((SLO(1.0, 0.0415),), (1.0,)))
    config = SimulationConfig(
        Limits(max_num_batched_tokens=2048, max_num_seqs=64), num_blocks=50_000
    )
    ours = num_good(Goodput(), trace, EXPERTS, config)
    assert ours > 2 * num_good(WithoutLongSteps(), trace, EXPERTS, config)


def test_long_steps_go_on_at_the_largest_tpot_though_it_leaves_prompts_little_time() -> None:
    """Decodes take 10.1 of 10.5 ms: two hundredths of that are left, less than a tenth."""
    pace = pace_of(*[R(f"d{i}", 11, 0.1, out=1, tpot_s=0.0105) for i in range(10)])
    found = long_steps(pace, EXPERTS, LIMITS.max_num_batched_tokens, min_share=0.1)
    assert found is not None
    assert found.tpot_s == 0.0105


def test_of_hundreds_of_tpots_only_a_few_are_weighed() -> None:
    """Each takes about ten predictions, and at first decodes leave nothing of a TPOT."""
    num_asked = 0

    class Counting(Experts):
        def predict(self, shape: BatchShape) -> float:
            nonlocal num_asked
            num_asked += 1
            return super().predict(shape)

    decodes = [R(f"d{i}", 11, 0.1, tpot_s=0.010 + i * 1e-4, out=1) for i in range(256)]
    pace = pace_of(*decodes)
    found = long_steps(pace, Counting(EXPERTS.coefficients), 1256, min_share=0.1)
    assert found is not None
    assert 0.0125 < found.tpot_s < 0.020
    assert num_asked < 150


class Padded(LinearModel):
    """A model of a device that pads each step to a multiple of 256 tokens: 5 ms + 10 for each."""

    def predict(self, shape: BatchShape) -> float:
        return 0.005 + 0.010 * math.ceil(shape.num_tokens / 256)


def test_a_chunk_that_costs_nothing_is_no_division_by_zero() -> None:
    """All decodes take 25 ms, with up to 212 tokens beside them, too.  Those of 20 ms, and the few
    others that are due within it, take 15, with 240 tokens beside them."""
    tight = [R(f"t{i}", 101, 0.020, tpot_s=0.020, out=1) for i in range(10)]
    loose = [R(f"l{i}", 101, 0.900, tpot_s=1.0, out=1) for i in range(290)]
    model = Padded(PROPORTIONAL.coefficients)
    pace = pace_of(*tight, *loose, model=model)
    chunks = chunks_beside(model, pace.shape, pace.all_s, 1748)
    assert [chunk.num_tokens for chunk in chunks if not chunk.token_s] == [64, 128]
    share = 1 - 0.015 / (0.98 * 0.020)
    in_turns = tokens_per_s_in_turns(0.020, 0.015, chunks)
    assert in_turns == pytest.approx(share * 128 / 0.010), "a step of 128 takes 10 ms longer"
    assert long_steps(pace, model, 2048, 0.1) is None, "they go faster within the TPOT"
    limits = Limits(max_num_batched_tokens=2048, max_num_seqs=400)
    view = view_of([*tight, *loose, R("p", 3000, 0.5)], model, limits=limits)
    assert Goodput().schedule(view).num_scheduled_tokens
