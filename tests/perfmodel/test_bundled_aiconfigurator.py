"""The bundled models of data-centre GPUs agree with their CSV files and with data sheets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path

import pytest

from slosched.core import BatchShape
from slosched.perfmodel import bundled_models, fit, load_model, read_profile
from slosched.perfmodel.server_time import SERVER_TIME_ORIGIN

CSVS = sorted((Path(__file__).parents[2] / "profiling" / "aiconfigurator").glob("*/*.csv"))
NAMES = [f"{path.parent.name}/{path.stem}" for path in CSVS]


def facts(name: str) -> Mapping[str, str]:
    return load_model(name).provenance


def test_every_source_is_bundled() -> None:
    assert NAMES
    assert set(NAMES) <= set(bundled_models())


def is_derived(name: str) -> bool:
    return "derivation_error" in load_model(name).provenance


@pytest.mark.parametrize("name", [name for name in NAMES if not is_derived(name)])
def test_it_was_judged_on_steps_that_it_was_not_fitted_to(name: str) -> None:
    model = load_model(name)
    error = model.held_out_error
    assert (error["count"], error["fitted"]) == (1500, 160)
    assert error["mape"] <= 1.6
    assert error["p99"] <= 8.0
    assert "additive by construction" in model.provenance["not_in_it"]


@pytest.mark.parametrize("name", [name for name in NAMES if is_derived(name)])
def test_a_derived_model_has_the_error_of_deriving_gpus_with_tables(name: str) -> None:
    """100 steps of each of five GPUs, each derived from the other four."""
    model = load_model(name)
    assert model.held_out_error["count"] == 500
    assert 5 < model.held_out_error["mape"] < 15
    assert model.held_out_error["p99"] > 15
    assert model.provenance["origin"] == "derived from other GPUs"
    assert model.provenance["method"].startswith("NOT MEASURED")


@pytest.mark.parametrize("name", [name for name in NAMES if "num_experts" in facts(name)])
def test_more_tokens_of_a_mixture_of_experts_need_more_experts(name: str) -> None:
    """32 decodes take far longer than one; with 64, most experts are needed already."""
    model = load_model(name)
    one, some, many = (model.predict(shape_of(((1, 100),) * count)) for count in (1, 32, 64))
    assert some > 1.6 * one
    assert many < 1.6 * some


@pytest.mark.parametrize("name", NAMES)
def test_a_model_says_what_its_server_adds_and_how_that_is_known(name: str) -> None:
    model = load_model(name)
    assert 0.001 < model.server_time.per_request_s < 0.02
    assert "docs/fidelity.md" in model.provenance[SERVER_TIME_ORIGIN]


@pytest.mark.parametrize(
    "name",
    [
        "h200/llama-3.1-8b",
        pytest.param("h200/qwen3-32b", marks=pytest.mark.slow),
        pytest.param("h200/llama-3.1-70b-tp4", marks=pytest.mark.slow),
    ],
)
def test_the_committed_steps_give_the_bundled_model(name: str) -> None:
    path = CSVS[NAMES.index(name)]
    bundled = load_model(name)
    profile = read_profile(path)
    model = fit(profile, bundled.form).model
    facts_of_server = {SERVER_TIME_ORIGIN: bundled.provenance[SERVER_TIME_ORIGIN]}
    assert dict(model.provenance) | facts_of_server == dict(bundled.provenance)
    for batch in (((1, 700),) * 40, ((2048, 0),), ((512, 4096), *((1, 1000),) * 100)):
        shape = shape_of(batch)
        # The file holds nanoseconds.
        assert model.predict(shape) == pytest.approx(bundled.predict(shape), rel=1e-4)


def shape_of(batch: tuple[tuple[int, int], ...]) -> BatchShape:
    shape = BatchShape()
    for chunk in batch:
        shape.add(*chunk)
    return shape


@pytest.mark.parametrize(
    ("name", "weights_gb", "bandwidth_gb_s"),
    [
        ("a100/llama-3.1-8b", 15.0, 2039),
        ("h100/llama-3.1-8b", 15.0, 3350),
        ("h200/llama-3.1-8b", 15.0, 4800),
        ("b200/llama-3.1-8b", 15.0, 8000),
        ("l40s/llama-3.1-8b", 15.0, 864),
        ("l40s/llama-3.2-3b", 6.4, 864),
        ("a30/llama-3.1-8b", 15.0, 933),
        ("l4/llama-3.1-8b", 15.0, 300),
        ("h200/qwen3-32b", 64.0, 4800),
        ("h200/llama-3.1-70b-tp4", 139.0 / 4, 4800),
    ],
)
def test_a_decode_alone_takes_longer_than_its_weights_and_not_twice_that(
    name: str, weights_gb: float, bandwidth_gb_s: float
) -> None:
    """The floor is bfloat16 weights without the input embedding, over the peak bandwidth."""
    floor_s = weights_gb / bandwidth_gb_s
    assert floor_s < load_model(name).predict(shape_of(((1, 500),))) < 2.1 * floor_s


def test_faster_gpus_are_faster() -> None:
    gpus = ("l40s", "a100", "h100", "h200", "b200")
    models = [load_model(f"{gpu}/llama-3.1-8b") for gpu in gpus]
    for batch in (((1, 2000),) * 64, ((4096, 0),), ((1024, 8192), *((1, 2000),) * 64)):
        times_s = [model.predict(shape_of(batch)) for model in models]
        # The H200 is an H100 with faster memory, so both are equal where arithmetic dominates.
        assert all(later < 1.05 * earlier for earlier, later in itertools.pairwise(times_s)), (
            batch,
            times_s,
        )
