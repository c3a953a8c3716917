"""The fit finds what is there, says what it cannot know, and is judged on what it never saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from factories import make_model

from slosched.perfmodel import (
    AttentionWork,
    FitReport,
    LinearModel,
    Measurement,
    Profile,
    fit_linear,
)
from slosched.perfmodel.fit import FitError, evaluate, split

TRUTH = make_model()
Chunks = tuple[tuple[int, int], ...]


def random_batches(count: int, seed: int = 0) -> list[Chunks]:
    """Decode, prefill and mixed batches in equal parts; prompts are continued at random points."""
    rng = np.random.default_rng(seed)

    def log_uniform(low: int, high: int) -> int:
        return int(math.exp(rng.uniform(math.log(low), math.log(high))))

    batches = []
    for i in range(count):
        prefills = [
            (log_uniform(16, 2048), log_uniform(1, 8192))
            for _ in range(0 if i % 3 == 0 else rng.integers(1, 4))
        ]
        decodes = [
            (1, log_uniform(16, 8192))
            for _ in range(0 if i % 3 == 1 else int(rng.integers(1, 128)))
        ]
        batches.append((*prefills, *decodes))
    return batches


def make_measurements(
    batches: Sequence[Chunks],
    truth: LinearModel = TRUTH,
    noise: float = 0.0,
    swapped_blocks: Sequence[int] = (0,),
) -> tuple[Measurement, ...]:
    rng = np.random.default_rng(1)
    measurements = []
    for i, chunks in enumerate(batches):
        blocks = swapped_blocks[i % len(swapped_blocks)]
        exact = Measurement(chunks, 1.0, num_swapped_blocks=blocks)
        factor = float(rng.lognormal(-0.5 * noise**2, noise)) if noise else 1.0
        measurements.append(replace(exact, seconds=truth.predict(exact.shape) * factor))
    return tuple(measurements)


def coefficients(report: FitReport) -> list[float]:
    return list(vars(report.model.coefficients).values())


def test_without_noise_the_fit_finds_the_coefficients() -> None:
    measurements = make_measurements(random_batches(300), swapped_blocks=(0, 0, 40))
    report = fit_linear(Profile(measurements))
    expected = list(vars(TRUTH.coefficients).values())
    assert coefficients(report) == pytest.approx(expected, rel=1e-6)
    assert report.held_out.p99 < 1e-4
    assert report.undetermined == ()


def test_with_noise_the_fit_is_as_wrong_as_the_noise_and_no_more() -> None:
    measurements = make_measurements(random_batches(1500), noise=0.05, swapped_blocks=(0, 0, 40))
    report = fit_linear(Profile(measurements))
    mean_size = 100 * 0.05 * math.sqrt(2 / math.pi)
    assert report.held_out.mape == pytest.approx(mean_size, rel=0.15)
    clean = make_measurements(random_batches(300, seed=5))
    assert evaluate(report.model, clean).p99 < 2.0


def test_coefficients_stay_non_negative_where_the_data_want_them_below_zero() -> None:
    """Steps that get shorter with every decode would fit best with a negative term."""
    batches = [((1, 99),) * n for n in range(1, 65)]
    measurements = tuple(Measurement(chunks, 0.1 - 0.001 * len(chunks)) for chunks in batches)
    report = fit_linear(Profile(measurements))
    assert min(coefficients(report)) >= 0
    assert report.model.coefficients.per_token_s == 0


def test_what_the_data_say_nothing_about_is_reported_and_zero() -> None:
    decodes_only = [chunks for chunks in random_batches(300) if all(new == 1 for new, _ in chunks)]
    report = fit_linear(Profile(make_measurements(decodes_only)))
    assert report.undetermined == ("per_attention_s", "per_swapped_block_s")
    assert report.model.coefficients.per_attention_s == 0
    assert report.model.coefficients.per_swapped_block_s == 0


def test_held_out_measurements_are_never_fitted() -> None:
    """Corrupting exactly those changes the reported error, but not one coefficient."""
    measurements = make_measurements(random_batches(200), noise=0.02)
    clean = fit_linear(Profile(measurements))
    held = set(clean.held_out_measurements)
    spoilt = tuple(replace(m, seconds=5 * m.seconds) if m in held else m for m in measurements)
    report = fit_linear(Profile(spoilt))
    assert coefficients(report) == coefficients(clean)
    assert report.train == clean.train
    assert report.held_out.mape > 50 > clean.held_out.mape
    assert report.held_out.under_p99 > 50, "times five times as long are under-predicted"


def test_each_regime_gives_its_share_to_the_held_out() -> None:
    measurements = make_measurements(random_batches(240), swapped_blocks=(0, 0, 0, 7))
    train, held_out = split(measurements, 0.25, seed=0)
    assert sorted(map(str, (*train, *held_out))) == sorted(map(str, measurements))
    for regime in ("decode", "prefill", "mixed", "swap"):
        total = sum(m.regime == regime for m in measurements)
        assert total > 0
        assert sum(m.regime == regime for m in held_out) == round(total / 4)


def test_the_split_is_decided_by_its_seed() -> None:
    measurements = make_measurements(random_batches(100))
    assert split(measurements, 0.25, seed=3) == split(measurements, 0.25, seed=3)
    assert split(measurements, 0.25, seed=3) != split(measurements, 0.25, seed=4)


def test_exact_attention_work_beats_the_literal_text_on_continued_prompts() -> None:
    """A device whose attention costs what the (query, key) pairs say, as real ones nearly do."""
    truth = make_model(per_attention_s=2e-8)
    profile = Profile(make_measurements(random_batches(600), truth, noise=0.02))
    exact = fit_linear(profile, attention=AttentionWork.EXACT)
    literal = fit_linear(profile, attention=AttentionWork.LITERAL)
    assert exact.held_out.mape < 2.5
    assert literal.held_out.mape > 3 * exact.held_out.mape
    assert literal.model.attention is AttentionWork.LITERAL


def test_balanced_regimes_are_not_outvoted() -> None:
    """Many mixed steps of another device than the few decode steps: each pulls alike."""
    batches = random_batches(900)
    decodes = [b for b in batches if all(new == 1 for new, _ in b)][:40]
    mixed = [b for b in batches if len({new == 1 for new, _ in b}) == 2]
    slow = make_model(per_context_s=5e-7)
    profile = Profile((*make_measurements(decodes), *make_measurements(mixed, slow)))
    plain = fit_linear(profile).by_regime
    balanced = fit_linear(profile, balance_regimes=True).by_regime
    assert balanced["decode"].mape < 0.7 * plain["decode"].mape
    assert balanced["mixed"].mape > plain["mixed"].mape


def test_balancing_changes_nothing_where_the_formula_is_right() -> None:
    profile = Profile(make_measurements(random_batches(100)))
    balanced = fit_linear(profile, balance_regimes=True)
    assert coefficients(balanced) == pytest.approx(coefficients(fit_linear(profile)), rel=1e-6)


def test_the_model_carries_its_origin_and_its_error() -> None:
    measurements = make_measurements(random_batches(100), noise=0.05)
    report = fit_linear(Profile(measurements, {"gpu": "a GPU"}))
    assert report.model.provenance == {"gpu": "a GPU"}
    assert report.model.held_out_error["mape"] == report.held_out.mape
    assert report.model.held_out_error["count"] == len(report.held_out_measurements) > 0


def test_errors_are_percentages_of_the_measured_time() -> None:
    """Predicted twice, half and exactly what was measured."""
    chunks = ((64, 0),)
    predicted_s = TRUTH.predict(Measurement(chunks, 1.0).shape)
    measured = [Measurement(chunks, predicted_s * factor) for factor in (0.5, 2.0, 1.0)]
    report = evaluate(TRUTH, measured)
    assert report.mape == pytest.approx((100 + 50 + 0) / 3)
    assert report.p50 == pytest.approx(50)
    assert report.under_p99 == pytest.approx(50, rel=0.03)


@pytest.mark.parametrize(("count", "is_enough"), [(15, False), (16, True)])
def test_too_few_measurements_are_refused(count: int, is_enough: bool) -> None:
    profile = Profile(make_measurements(random_batches(count)))
    if is_enough:
        assert fit_linear(profile).held_out.count > 0
        return
    with pytest.raises(FitError, match="15 measurements are too few"):
        fit_linear(profile)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5])
def test_a_held_out_share_lies_between_none_and_all(fraction: float) -> None:
    profile = Profile(make_measurements(random_batches(20)))
    with pytest.raises(ValueError, match=f"must lie between 0 and 1, not {fraction}"):
        fit_linear(profile, held_out_fraction=fraction)


def test_there_is_no_error_without_measurements() -> None:
    with pytest.raises(FitError, match="nothing to evaluate"):
        evaluate(TRUTH, [])
