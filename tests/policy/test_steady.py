"""How many prompt tokens go through in the long run, within a TPOT."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from views import flat_model

from slosched.perfmodel import load_model
from slosched.policy.kit.steady import Steady

MODEL = flat_model()
"""5 ms + 50 us a token."""
H100 = load_model("h100/llama-3.1-8b")


def test_the_time_of_a_step_is_divided_among_prompts_and_decodes() -> None:
    """In 50 ms there is time for 900 tokens, of which two thirds are of prompts."""
    steady = Steady(400.0, 200.0, MODEL, budget_tokens=8192)
    assert steady.tokens_per_s(0.050) == pytest.approx(600 / 0.050, rel=0.02)


def test_steps_without_tokens_left_follow_one_another() -> None:
    """A step of 600 tokens takes 35 ms."""
    steady = Steady(400.0, 200.0, MODEL, budget_tokens=600)
    assert steady.tokens_per_s(0.5) == pytest.approx(400 / 0.035)


def test_what_is_cached_of_prompts_is_no_work_but_is_read_by_their_decodes() -> None:
    """Beside 40 decodes of the whole prompts a step has less time for the rest of prompts."""
    alone = Steady(400.0, 200.0, H100, budget_tokens=2048).tokens_per_s(0.020)
    cached = Steady(400.0, 200.0, H100, budget_tokens=2048, cached_tokens=8000.0)
    whole = Steady(8400.0, 200.0, H100, budget_tokens=2048).tokens_per_s(0.020)
    assert cached.tokens_per_s(0.020) < 0.8 * alone
    assert cached.tokens_per_s(0.020) / 400 > whole / 8400, "more requests than without a cache"


def test_no_prompt_goes_through_a_step_without_time_for_a_tile() -> None:
    """One decode and 64 tokens take 8.25 ms."""
    steady = Steady(400.0, 200.0, MODEL, budget_tokens=8192)
    assert steady.tokens_per_s(0.008) == 0.0
    assert steady.tokens_per_s(0.010) > 0.0


def test_long_steps_count_where_first_tokens_are_dear() -> None:
    """On a mixture of experts hardly any prompt fits into a step as long as the TPOT."""
    model = load_model("h100/qwen3-30b-a3b")
    within = Steady(1000.0, 200.0, model, 2048).tokens_per_s(0.025)
    in_turns = Steady(1000.0, 200.0, model, 2048, has_long_steps=True).tokens_per_s(0.025)
    assert in_turns > 2 * within


@given(
    prompt=st.floats(1, 20_000),
    output=st.floats(1, 5000),
    tpot_s=st.floats(0.001, 1.0),
    budget=st.sampled_from([256, 2048, 8192]),
)
def test_no_more_goes_through_than_the_device_computes_without_decodes(
    prompt: float, output: float, tpot_s: float, budget: int
) -> None:
    tokens_per_s = Steady(prompt, output, H100, budget).tokens_per_s(tpot_s)
    assert 0 <= tokens_per_s <= budget / H100.predict_prefill(2)
