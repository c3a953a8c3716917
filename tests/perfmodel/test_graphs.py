"""Steps that CUDA graphs pad: the time is a staircase, and a fit finds its steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_steps import make_measurements, make_shape, random_batches
from test_layered import EXPERTS, REQUESTS, ROOFLINE, SEPARATE

from slosched.perfmodel import (
    FITTERS,
    FitError,
    LayeredModel,
    Profile,
    fit,
    load_model,
    save_model,
)
from slosched.perfmodel.errors import evaluate
from slosched.perfmodel.graphs import (
    GRAPH_SIZES,
    PaddedLayers,
    padded,
    parse_graph_sizes,
    vllm_graph_sizes,
    with_graph_sizes,
)
from slosched.perfmodel.roofline import RooflineLayers
from slosched.perfmodel.table import Table

COARSE = (1, 2, 4, 8, 32, 128, 512)
STEEP = RooflineLayers(1e-3, 0.006, 1e-4, 1e-4, 3.0)
STAIRCASE = LayeredModel(PaddedLayers(COARSE, STEEP), Table((1,), (0.0,)), SEPARATE)


def test_vllm_captures_every_eighth_size_and_then_every_sixteenth() -> None:
    sizes = vllm_graph_sizes()
    assert sizes[:6] == (1, 2, 4, 8, 16, 24)
    assert {240, 248, 256, 272, 288, 496, 512} < set(sizes)
    assert not {3, 12, 252, 264, 280, 520} & set(sizes)
    assert vllm_graph_sizes(256)[-2:] == (248, 256)
    assert vllm_graph_sizes(4) == (1, 2, 4)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("none", ()),
        ("vllm", vllm_graph_sizes()),
        ("vllm:16", (1, 2, 4, 8, 16)),
        ("8,1,2,8", (1, 2, 8)),
    ],
)
def test_sizes_are_read_from_text(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_graph_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "vlm", "1,two", "0,8", "-1", "vllm:x", "vllm:0", "none:3"])
def test_other_texts_are_refused_with_examples(text: str) -> None:
    with pytest.raises(FitError, match=r"no sizes of CUDA graphs; write vllm, vllm:256 for"):
        parse_graph_sizes(text)


def test_a_step_runs_as_the_next_captured_size_and_beyond_the_last_as_it_is() -> None:
    counts = np.array([1.0, 3, 4, 5, 9, 128, 129, 512, 513, 4000])
    assert padded(counts, COARSE).tolist() == [1, 4, 4, 8, 32, 128, 512, 512, 513, 4000]


def test_the_prediction_is_a_staircase() -> None:
    """Without attention, one decode more costs nothing unless it needs the next larger graph."""
    decodes = [make_shape(*((1, 0),) * n) for n in range(1, 200)]
    layers_s = np.array([STAIRCASE.predict(d) - SEPARATE.decode.seconds(d) for d in decodes])
    rises = (np.flatnonzero(np.diff(layers_s) > 1e-9) + 2).tolist()
    assert rises == [n + 1 for n in COARSE if n < 199]


@given(counts=st.lists(st.integers(0, 20_000), min_size=2, max_size=9).map(sorted))
@pytest.mark.parametrize("layers", [STEEP, EXPERTS, ROOFLINE, Table((1, 9), (0.1, 0.3))])
def test_padded_layers_never_fall(layers: Table, counts: list[int]) -> None:
    unpadded_s = layers.at(np.array(counts, dtype=float))
    padded_s = PaddedLayers(COARSE, layers).at(np.array(counts, dtype=float))
    assert np.all(np.diff(padded_s) >= 0)
    assert np.all(padded_s >= unpadded_s)


def test_padded_layers_survive_a_file(tmp_path: Path) -> None:
    for layers in (STEEP, EXPERTS, Table((1, 9), (0.1, 0.3))):
        model = LayeredModel(PaddedLayers(COARSE, layers), REQUESTS, SEPARATE)
        save_model(model, tmp_path / "model.json")
        loaded = load_model(tmp_path / "model.json")
        assert loaded.form == LayeredModel(layers, REQUESTS, SEPARATE).form
        for n in (1, 3, 40, 600):
            shape = make_shape((n, 5), (1, 9))
            assert loaded.predict(shape) == model.predict(shape)


@pytest.mark.parametrize("form", ["roofline", "profiled-separate"])
def test_a_fit_that_knows_the_sizes_is_better_on_a_device_with_stairs(form: str) -> None:
    batches = [*random_batches(80), *(((1, 50 * (n % 40)),) * n for n in range(1, 200, 5))]
    steps = make_measurements(batches, STAIRCASE, noise=0.01)
    judged = make_measurements([((1, 700),) * n for n in range(1, 300, 3)], STAIRCASE)
    knowing = with_graph_sizes(Profile(steps), ",".join(map(str, COARSE)), form)
    errors = [
        evaluate(FITTERS[form](steps, facts, 0)[0], judged).mape
        for facts in (knowing.provenance, {})
    ]
    assert errors[0] < 1.5
    assert errors[1] > 3 * errors[0]


def test_the_sizes_are_kept_with_the_model_and_can_be_taken_back() -> None:
    steps = make_measurements(random_batches(30), STAIRCASE)
    profile = with_graph_sizes(Profile(steps, {"gpu": "a GPU"}), "vllm:256", "auto")
    report = fit(profile, "roofline", num_folds=2)
    assert report.model.provenance[GRAPH_SIZES].startswith("1,2,4,8,16,")
    assert isinstance(report.model, LayeredModel)
    assert isinstance(report.model.layers, PaddedLayers)
    assert report.model.layers.graph_sizes == vllm_graph_sizes(256)
    assert with_graph_sizes(profile, "none", "auto").provenance == {"gpu": "a GPU"}


def test_the_linear_formula_has_no_layers_to_pad() -> None:
    profile = Profile(make_measurements(random_batches(30), STAIRCASE))
    with pytest.raises(FitError, match="linear counts tokens as they are"):
        with_graph_sizes(profile, "vllm", "linear")
    assert with_graph_sizes(profile, "none", "linear").provenance == {}


@pytest.mark.parametrize("sizes", [(), (0, 4), (4, 2), (2, 2)])
def test_impossible_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sizes of graphs must rise from 1"):
        PaddedLayers(sizes, STEEP)
