"""Boosted trees: they are scikit-learn's own, they never fall, and no scheduler gets them."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from factories import make_model
from hypothesis import given
from hypothesis import strategies as st
from sklearn.ensemble import HistGradientBoostingRegressor
from synthetic_steps import Chunks, make_measurements, make_shape, random_batches
from test_layered import FORMS
from threadpoolctl import threadpool_limits

from slosched.integrations.vllm.settings import SettingsError, read_settings
from slosched.perfmodel import FITTERS, FitError, FitReport, Profile, fit, load_model, save_model
from slosched.perfmodel.boosting import FEATURES, BoostedModel
from slosched.perfmodel.errors import evaluate
from slosched.perfmodel.fit_boosting import fit_boosting
from slosched.perfmodel.scheduling import TooSlowError, check_can_schedule
from slosched.perfmodel.store import ModelFileError

TRUTH = make_model()
NOISE = 0.03
STEPS = make_measurements(random_batches(700), TRUTH, NOISE, swapped_blocks=(0, 0, 0, 0, 60))


@cache
def fitted() -> BoostedModel:
    model, _ = fit_boosting(STEPS, {}, 0)
    assert isinstance(model, BoostedModel)
    return model


@cache
def report() -> FitReport:
    return fit(Profile(STEPS[:420]), "boosting", num_folds=3)


def test_the_trees_say_what_scikit_learn_says() -> None:
    steps = [m for m in STEPS if not m.num_swapped_blocks]
    features = np.array([[getattr(m.shape, name) for name in FEATURES] for m in steps], dtype=float)
    regressor = HistGradientBoostingRegressor(
        max_iter=150,
        max_leaf_nodes=15,
        min_samples_leaf=5,
        monotonic_cst=[1] * len(FEATURES),
        early_stopping=False,
        random_state=0,
    )
    with threadpool_limits(1):
        regressor.fit(features, np.log([m.seconds for m in steps]))
    expected = np.exp(regressor.predict(features))
    assert [fitted().predict(m.shape) for m in steps] == pytest.approx(expected.tolist(), rel=1e-9)


def test_on_new_steps_of_the_same_kind_the_error_is_little_more_than_the_noise() -> None:
    fresh = make_measurements(random_batches(300, seed=5), TRUTH)
    assert evaluate(fitted(), fresh).mape < 8


def test_the_upper_bound_holds_for_99_of_100_new_steps() -> None:
    fresh = make_measurements(random_batches(600, seed=6), TRUTH, NOISE)
    covered = np.mean([m.seconds <= fitted().predict_upper(m.shape) for m in fresh])
    assert covered > 0.97
    assert all(fitted().predict_upper(m.shape) >= fitted().predict(m.shape) for m in fresh)


def test_the_time_of_a_copied_block_is_found() -> None:
    assert fitted().swapped_block_s == pytest.approx(2e-5, rel=0.25)


batches = st.lists(
    st.tuples(st.integers(1, 3000), st.integers(0, 16_384)), min_size=1, max_size=6
).map(tuple)


@given(batch=batches, new=st.integers(1, 3000), prior=st.integers(0, 16_384))
def test_one_more_request_never_makes_a_step_faster(batch: Chunks, new: int, prior: int) -> None:
    model = fitted()
    base, more = make_shape(*batch), make_shape(*batch, (new, prior))
    assert model.predict(more) >= model.predict(base) * (1 - 1e-12)
    assert model.predict_upper(more) >= model.predict_upper(base) * (1 - 1e-12)


def test_a_fitted_model_survives_a_file(tmp_path: Path) -> None:
    save_model(fitted(), tmp_path / "model.json")
    loaded = load_model(tmp_path / "model.json")
    for chunks in random_batches(40, seed=3):
        shape = make_shape(*chunks, num_swapped_blocks=3)
        assert loaded.predict(shape) == fitted().predict(shape)
        assert loaded.predict_upper(shape) == fitted().predict_upper(shape)


@pytest.mark.parametrize(
    ("good", "bad", "said"),
    [
        ('"num_prefills"', '"num_cooks"', "other sums"),
        ("512.0", "NaN", "finite"),
        ("[\n     0,", "[\n     99,", "not number 99"),
    ],
)
def test_a_file_with_broken_trees_is_refused(
    good: str, bad: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    save_model(FORMS["boosting"], path)
    text = path.read_text()
    assert good in text
    path.write_text(text.replace(good, bad, 1))
    with pytest.raises(ModelFileError, match=said):
        load_model(path)


def test_trees_are_compared_with_the_formulas_and_chosen_only_by_name() -> None:
    assert report().model.form == "boosting"
    assert list(report().considered) == [*FITTERS, "boosting"]
    assert report().held_out.count == 420, "the trees are judged on all steps, by folds"
    assert "boosting" not in FITTERS, "so that `auto` does not choose it"


def test_few_steps_are_refused() -> None:
    with pytest.raises(FitError, match="at least 200 different batches, and 76 are there"):
        fit(Profile(STEPS[:120]), "boosting", num_folds=5)


def test_no_scheduler_gets_trees_and_the_error_names_their_cost() -> None:
    with pytest.raises(TooSlowError, match=r"boosting takes \d+ µs .* allows 2 µs\. Fit another"):
        check_can_schedule(fitted())
    for form, model in FORMS.items():
        if form != "boosting":
            check_can_schedule(model)


@pytest.mark.parametrize("key", ["profile", "emulate"])
def test_vllm_does_not_start_with_trees(key: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save_model(FORMS["boosting"], path)
    settings = read_settings({"slosched": {"policy": "goodput", key: str(path)}})
    with pytest.raises(SettingsError, match=rf"slosched\.{key}: this latency model cannot sched"):
        settings.make_model("a GPU")


def test_beyond_the_fitted_steps_the_trees_know_nothing() -> None:
    far = [fitted().predict(make_shape((n, 0))) for n in (20_000, 40_000)]
    assert far[0] == far[1]
    assert math.isfinite(far[0])
