"""Steps that are larger than any that was fitted are said to be extrapolated."""

from __future__ import annotations

from pathlib import Path

import pytest
from factories import make_model

from slosched.perfmodel import Measurement, Profile, fit, load_model, read_profile
from slosched.perfmodel.profiled_range import LARGEST_STEP_TOKENS, beyond_range, with_range

PROFILE = Path(__file__).parents[2] / "profiling" / "cpu" / "profile.csv"


@pytest.mark.parametrize(
    ("name", "largest"),
    [
        ("h100/llama-3.1-8b", 8192),
        ("rtx4090/llama-3.1-8b", 2048),
        ("rtx4090/llama-3.2-3b", 2048),
        ("rtxpro6000/qwen3-32b", 2048),
        ("cpu/smollm2-135m", 256),
    ],
)
def test_a_model_says_how_large_its_steps_were(name: str, largest: int) -> None:
    model = load_model(name)
    assert beyond_range(model, largest) is None
    said = beyond_range(model, 16_384)
    assert said is not None
    assert "16384" in said
    assert f"--max-num-batched-tokens {largest}" in said


@pytest.mark.parametrize("told", [None, "4096"])
def test_a_fit_says_how_large_the_steps_of_its_profile_were(told: str | None) -> None:
    """A profile that was put together of others says it itself."""
    facts = {"device": "x"} if told is None else {"device": "x", LARGEST_STEP_TOKENS: told}
    steps = [
        Measurement(((chunk, 0), *((1, context),) * decodes), 0.01 + 1e-4 * chunk + 1e-6 * context)
        for chunk in (1, 16, 100, 200)
        for context in (10, 500)
        for decodes in (0, 3, 50)
    ]
    model = fit(Profile(tuple(steps), facts), "linear").model
    assert model.provenance == {"device": "x", LARGEST_STEP_TOKENS: told or "250"}


def test_the_bundled_cpu_says_what_its_profile_says() -> None:
    measured = read_profile(PROFILE)
    told = load_model("cpu/smollm2-135m").provenance[LARGEST_STEP_TOKENS]
    assert told == with_range(measured)[LARGEST_STEP_TOKENS]


@pytest.mark.parametrize("tokens", [1, 1_000_000])
def test_a_model_that_does_not_say_it_passes(tokens: int) -> None:
    assert beyond_range(make_model(), tokens) is None
