"""Steps that are larger than any that was fitted are said to be extrapolated."""

from __future__ import annotations

import pytest
from factories import make_model

from slosched.perfmodel import load_model
from slosched.perfmodel.profiled_range import beyond_range


def test_a_model_says_how_large_its_steps_were() -> None:
    model = load_model("h100/llama-3.1-8b")
    assert beyond_range(model, 8192) is None
    said = beyond_range(model, 16_384)
    assert said is not None
    assert "16384" in said
    assert "--max-num-batched-tokens 8192" in said


@pytest.mark.parametrize("tokens", [1, 1_000_000])
def test_a_model_that_does_not_say_it_passes(tokens: int) -> None:
    assert beyond_range(make_model(), tokens) is None
