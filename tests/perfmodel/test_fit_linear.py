"""The fit of the linear formula: it finds the coefficients, and says which are undetermined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from factories import make_model
from synthetic_steps import Chunks, make_measurements, random_batches

from slosched.perfmodel import AttentionWork, FitError, LinearModel, Measurement
from slosched.perfmodel.errors import evaluate, predictions
from slosched.perfmodel.fit_linear import fit_linear
from slosched.perfmodel.solve import Estimate

TRUTH = make_model()


def coefficients(model: LinearModel) -> list[float]:
    return list(vars(model.coefficients).values())


def undetermined(estimates: Sequence[Estimate]) -> list[str]:
    return [e.name for e in estimates if not e.is_determined]


def test_without_noise_the_fit_finds_the_coefficients() -> None:
    steps = make_measurements(random_batches(300), TRUTH, swapped_blocks=(0, 0, 40))
    model, estimates = fit_linear(steps)
    assert coefficients(model) == pytest.approx(coefficients(TRUTH), rel=1e-6)
    assert [e.value for e in estimates] == coefficients(model)
    assert undetermined(estimates) == []


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """The 95 % intervals of the constant and of C6 are checked over 60 draws of the noise."""
    batches = random_batches(90)
    exact = make_measurements(batches, TRUTH, swapped_blocks=(0, 0, 40))
    hits = 0
    for seed in range(60):
        noise = np.random.default_rng(seed).normal(1, 0.05, len(exact))
        steps = [replace(m, seconds=m.seconds * f) for m, f in zip(exact, noise, strict=True)]
        found = {e.name: e for e in fit_linear(steps)[1]}
        for name in ("constant_s", "per_swapped_block_s"):
            true = getattr(TRUTH.coefficients, name)
            hits += found[name].low <= true <= found[name].high
    assert 0.85 <= hits / 120 <= 0.995


def test_coefficients_stay_non_negative_where_the_data_want_them_below_zero() -> None:
    """The steps get shorter with every decode, so a negative coefficient would fit best."""
    batches = [((1, 99),) * n for n in range(1, 65)]
    steps = [Measurement(chunks, 0.1 - 0.001 * len(chunks)) for chunks in batches]
    model, estimates = fit_linear(steps)
    assert min(coefficients(model)) >= 0
    assert model.coefficients.per_token_s == 0
    assert min(e.low for e in estimates) >= 0


def test_what_the_data_say_nothing_about_is_reported_and_zero() -> None:
    decodes_only = [chunks for chunks in random_batches(300) if all(new == 1 for new, _ in chunks)]
    model, estimates = fit_linear(make_measurements(decodes_only, TRUTH))
    # With decodes in every step, C5 is as constant as C7.
    assert undetermined(estimates) == ["per_attention_s", "any_decode_s", "per_swapped_block_s"]
    assert model.coefficients.per_attention_s == 0
    assert model.coefficients.per_swapped_block_s == 0
    total_s = TRUTH.coefficients.any_decode_s + TRUTH.coefficients.constant_s
    assert model.coefficients.constant_s == pytest.approx(total_s, rel=1e-6)


@pytest.mark.parametrize(
    ("batches", "shared", "kept"),
    [
        # With whole tiles only, C4's column is C1's column divided by 64.
        (
            [((64 * n, 100 * (n % 5)),) for n in range(1, 20)] + [((1, 10),) * 64] * 3,
            "per_tile_s",
            "per_token_s",
        ),
        # With decodes of one context alone, C3's column is C1's column times that context.
        ([((1, 99),) * n for n in range(1, 40)], "per_context_s", "per_token_s"),
    ],
)
def test_columns_that_say_the_same_are_reported_and_the_first_takes_it_all(
    batches: list[Chunks], shared: str, kept: str
) -> None:
    model, estimates = fit_linear(make_measurements(batches, TRUTH))
    assert shared in undetermined(estimates)
    assert kept not in undetermined(estimates)
    assert getattr(model.coefficients, shared) == 0
    steps = make_measurements(batches, TRUTH)
    assert predictions(model, steps) == pytest.approx([m.seconds for m in steps], rel=0.05)


def test_batches_of_one_shape_determine_nothing() -> None:
    with pytest.raises(FitError, match="all 40 measurements are of batches of the same shape"):
        fit_linear([Measurement(((64, 0), (1, 10)), 0.01 + 1e-4 * i) for i in range(40)])


def test_exact_attention_work_beats_the_literal_text_on_continued_prompts() -> None:
    """The attention of this device takes time for each (query, key) pair, as on real devices."""
    truth = make_model(per_attention_s=2e-8)
    steps = make_measurements(random_batches(600), truth, noise=0.02)
    exact, _ = fit_linear(steps, AttentionWork.EXACT)
    literal, _ = fit_linear(steps, AttentionWork.LITERAL)
    assert evaluate(exact, steps).mape < 2.5
    assert evaluate(literal, steps).mape > 3 * evaluate(exact, steps).mape
    assert (exact.form, literal.form) == ("linear", "linear-literal")
