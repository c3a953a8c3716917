"""A fit is judged on steps that it did not see, chooses a form by that, or refuses a profile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from factories import make_model
from synthetic_steps import Chunks, make_measurements, random_batches

from slosched.perfmodel import FITTERS, LEARNT, FitError, Measurement, Profile, fit
from slosched.perfmodel.errors import evaluate, groups, predictions
from slosched.perfmodel.fit_linear import fit_linear
from slosched.perfmodel.fit_report import parameter_rows
from slosched.perfmodel.split import folds, on_grid

TRUTH = make_model()
NUM_FOLDS = 5


def spoil(steps: Sequence[Measurement], indices: Sequence[int]) -> tuple[Measurement, ...]:
    spoilt = set(indices)
    return tuple(
        replace(m, seconds=5 * m.seconds) if i in spoilt else m for i, m in enumerate(steps)
    )


def test_each_step_of_a_small_profile_is_judged_by_a_fit_without_it() -> None:
    """Spoiling the times of one fold changes all predictions but those for that fold."""
    steps = make_measurements(random_batches(200), TRUTH, noise=0.02)
    clean = fit(Profile(steps), "linear", num_folds=NUM_FOLDS)
    assert clean.held_out_measurements == steps
    for fold in folds(steps, NUM_FOLDS, seed=0):
        report = fit(Profile(spoil(steps, fold)), "linear", num_folds=NUM_FOLDS)
        same = [
            a == b
            for a, b in zip(
                report.held_out_predictions_s, clean.held_out_predictions_s, strict=True
            )
        ]
        assert [i for i, unchanged in enumerate(same) if unchanged] == fold
        assert report.held_out.max > 79, "times five times as long are under-predicted by 80 %"


def test_the_model_of_a_small_profile_is_fitted_to_all_of_it() -> None:
    steps = make_measurements(random_batches(200), TRUTH, noise=0.02)
    report = fit(Profile(steps), "linear")
    alone, _ = fit_linear(steps)
    assert vars(report.model.coefficients) == vars(alone.coefficients)
    assert report.train.count == report.held_out.count == 200
    assert report.train.mape < report.held_out.mape
    assert report.held_out.mape != evaluate(report.model, steps).mape


def test_a_parameter_of_milliseconds_is_written_in_whole_microseconds() -> None:
    truth = make_model(constant_s=0.0256)
    report = fit(Profile(make_measurements(random_batches(200), truth)), "linear")
    written = {name: rest for name, *rest in parameter_rows(report)}
    assert written["C4 per tile"] == ["1000 µs", "1,000 to 1,000 µs"]
    assert written["C7 constant"] == ["25,600 µs", "25,600 to 25,600 µs"]


def test_of_a_large_profile_a_covering_part_is_fitted_and_all_others_judge() -> None:
    """Spoiling the judging steps changes the reported error, but no prediction."""
    steps = make_measurements(random_batches(900), TRUTH, noise=0.02, swapped_blocks=(0, 0, 40))
    clean = fit(Profile(steps), "linear")
    held = set(clean.held_out_measurements)
    assert 200 < clean.train.count <= 320
    assert clean.train.count + clean.held_out.count == 900
    indices = [i for i, m in enumerate(steps) if m in held]
    report = fit(Profile(spoil(steps, indices)), "linear")
    assert report.held_out_predictions_s == clean.held_out_predictions_s
    assert report.train == clean.train
    assert report.held_out.mape > 50 > clean.held_out.mape
    assert report.held_out.under_p99 > 50, "times five times as long are under-predicted"
    judged = predictions(report.model, report.held_out_measurements).tolist()
    assert judged == list(report.held_out_predictions_s)


def test_with_noise_the_fit_is_as_wrong_as_the_noise_and_no_more() -> None:
    steps = make_measurements(random_batches(1500), TRUTH, noise=0.05, swapped_blocks=(0, 0, 40))
    report = fit(Profile(steps), "linear")
    mean_size = 100 * 0.05 * math.sqrt(2 / math.pi)
    assert report.held_out.mape == pytest.approx(mean_size, rel=0.15)
    assert evaluate(report.model, make_measurements(random_batches(300, seed=5), TRUTH)).p99 < 3.0


def test_errors_stand_for_each_regime_and_for_long_contexts() -> None:
    steps = make_measurements(random_batches(240), TRUTH, swapped_blocks=(0, 0, 0, 7))
    report = fit(Profile(steps), "linear")
    counts = {regime: error.count for regime, error in report.by_regime.items()}
    kinds = {regime: counts[regime] for regime in ("decode", "mixed", "prefill", "swap")}
    assert kinds == {r: sum(m.regime == r for m in steps) for r in kinds}
    assert 0 < counts["long context"] < 240
    assert sum(kinds.values()) == report.held_out.count == 240


def test_the_seed_decides_the_split() -> None:
    profile = Profile(make_measurements(random_batches(100), TRUTH, noise=0.05))
    first, second, other = (fit(profile, "linear", seed=seed) for seed in (3, 3, 4))
    assert first.held_out_predictions_s == second.held_out_predictions_s
    assert first.held_out != other.held_out


def test_what_the_measurements_do_not_determine_is_reported() -> None:
    """The batches have no copies and only whole tiles, and all of them have decodes."""
    batches = [((64 * n, 128 * (n % 7)), *((1, 50 * n),) * 64) for n in range(1, 20)]
    batches += [((1, 30 * n),) * 64 for n in range(1, 20)]
    report = fit(Profile(make_measurements(batches, TRUTH)), "linear")
    assert report.undetermined == ("per_tile_s", "any_decode_s", "per_swapped_block_s")


def test_off_the_grid_is_judged_by_a_fit_on_the_grid() -> None:
    """The device has expensive tiles, of which a grid of powers of two shows few."""
    sizes = [2**k for k in range(6, 12)]
    grid = [((chunk, prior), *((1, 256),) * 16) for chunk in sizes for prior in (0, 128, 1024)]
    grid += [((1, 2**k),) * 2**n for k in range(5, 12) for n in range(6)]
    steps = make_measurements((*grid, *random_batches(60, seed=2)), TRUTH)
    assert sum(map(on_grid, steps)) == len(grid)
    report = fit(Profile(steps), "linear")
    assert report.off_grid is not None
    assert report.off_grid.count == 60
    spoilt = fit(Profile(spoil(steps, range(len(grid), len(steps)))), "linear").off_grid
    assert spoilt is not None
    assert spoilt.under_p95 == pytest.approx(80, abs=1), "only those off the grid were spoilt"
    assert fit(Profile(steps[: len(grid)]), "linear").off_grid is None


def test_the_model_carries_its_origin_and_its_error() -> None:
    steps = make_measurements(random_batches(100), TRUTH, noise=0.05)
    report = fit(Profile(steps, {"gpu": "a GPU"}), "linear")
    assert report.model.provenance["gpu"] == "a GPU"
    error = report.model.held_out_error
    assert (error["mape"], error["p99"], error["under_p99"]) == (
        report.held_out.mape,
        report.held_out.p99,
        report.held_out.under_p99,
    )
    assert error["count"] == error["fitted"] == 100


def test_errors_are_percentages_of_the_measured_time() -> None:
    """One prediction is twice the measured time, one is half of it, and one is exact."""
    chunks = ((64, 0),)
    predicted_s = TRUTH.predict(Measurement(chunks, 1.0).shape)
    measured = [Measurement(chunks, predicted_s * factor) for factor in (0.5, 2.0, 1.0)]
    report = evaluate(TRUTH, measured)
    assert report.mape == pytest.approx((100 + 50 + 0) / 3)
    assert report.bias == pytest.approx((100 - 50 + 0) / 3)
    assert (report.p50, report.max) == (pytest.approx(50), pytest.approx(100))
    assert report.under_p99 == pytest.approx(50, rel=0.03)


def test_there_is_no_error_without_measurements() -> None:
    with pytest.raises(FitError, match="nothing to evaluate"):
        evaluate(TRUTH, [])


@pytest.mark.parametrize(("count", "is_enough"), [(15, False), (16, True)])
def test_too_few_steps_are_refused(count: int, is_enough: bool) -> None:
    profile = Profile(make_measurements(random_batches(count), TRUTH))
    if is_enough:
        assert fit(profile, "linear").held_out.count == 16
        return
    with pytest.raises(FitError, match=r"15 different batches are too few .* at least 16 b"):
        fit(profile)


@pytest.mark.parametrize("form", ["auto", *FITTERS, *LEARNT])
@pytest.mark.parametrize(
    ("kind", "missing"), [("decode", "a prefill chunk"), ("prefill", "decodes")]
)
def test_a_profile_of_one_regime_is_refused_and_the_other_is_named(
    form: str, kind: str, missing: str
) -> None:
    steps = make_measurements(random_batches(120), TRUTH)
    with pytest.raises(FitError, match=f"no measured step has {missing}"):
        fit(Profile(tuple(m for m in steps if m.regime == kind)), form)


def test_an_unknown_form_is_refused_with_those_there_are() -> None:
    profile = Profile(make_measurements(random_batches(20), TRUTH))
    with pytest.raises(FitError, match="no form 'cubic'; there are auto, linear-literal, linear"):
        fit(profile, "cubic")


def test_groups_name_every_regime_and_the_long_contexts() -> None:
    batches: list[Chunks] = [((64, 0),), ((1, 10),), ((64, 900), (1, 10)), ((1, 99), (1, 3))]
    found = groups(make_measurements(batches, TRUTH))
    assert found == {"decode": [1, 3], "mixed": [2], "prefill": [0], "long context": [2]}
