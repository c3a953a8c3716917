"""Steps that are larger than any that was fitted are said to be extrapolated."""

from __future__ import annotations

import pytest
from factories import make_model

from slosched.perfmodel import load_model
from slosched.perfmodel.profiled_range import beyond_range


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("h100/llama-3.1-8b", 8192),
        ("rtx4090/llama-3.1-8b", 2048),
        ("rtx4090/llama-3.2-3b", 2048),
        ("rtxpro6000/qwen3-32b", 2048),
    ],
)
def test_a_model_says_how_large_its_steps_were(name: str, largest: int) -> None:
    model = load_model(name)
    assert beyond_range(model, largest) is None
    said = beyond_range(model, 16_384)
    assert said is not None
    assert "16384" in said
    assert f"--max-num-batched-tokens {largest}" in said


@pytest.mark.parametrize("tokens", [1, 1_000_000])
def test_a_model_that_does_not_say_it_passes(tokens: int) -> None:
    assert beyond_range(make_model(), tokens) is None
