"""The linear formula: its terms, that it is monotone, and the time of a prediction."""

from __future__ import annotations

import math

import pytest
from factories import make_model
from hypothesis import given
from hypothesis import strategies as st
from machine import slowed
from pytest_benchmark.fixture import BenchmarkFixture
from synthetic_steps import make_shape

from slosched.core import BatchShape
from slosched.perfmodel import AttentionWork, LinearCoefficients, LinearModel, scaled

MAX_PREDICT_S = 5e-6
POWERS = LinearCoefficients(*(10.0**i for i in range(7)))
"""Coefficients in different decimal places, so that a prediction shows every feature."""


@pytest.mark.parametrize(
    ("shape", "exact_s", "literal_s"),
    [
        (make_shape(), 0, 0),
        (make_shape(num_swapped_blocks=3), 1_300_000, 1_300_000),
        (make_shape((1, 4)), 1_011_501, 1_011_501),
        (make_shape((1, 2), (1, 3), num_swapped_blocks=2), 1_211_702, 1_211_702),
        (make_shape((3, 0)), 1_001_063, 1_001_093),
        (make_shape((2, 1)), 1_001_052, 1_001_042),
    ],
)
def test_a_prediction_is_the_sum_of_seven_terms(
    shape: BatchShape, exact_s: float, literal_s: float
) -> None:
    assert LinearModel(POWERS).predict(shape) == exact_s
    assert LinearModel(POWERS, AttentionWork.LITERAL).predict(shape) == literal_s


@pytest.mark.parametrize(("num_tokens", "tiles"), [(1, 1), (64, 1), (65, 2), (128, 2), (129, 3)])
def test_time_climbs_a_stair_every_64_tokens(num_tokens: int, tiles: int) -> None:
    tile_only = LinearModel(LinearCoefficients(0, 0, 0, 1.0, 0, 0, 0))
    assert tile_only.predict_prefill(num_tokens) == tiles


chunks = st.tuples(st.integers(1, 4096), st.integers(0, 16_384))
models = st.builds(
    LinearModel,
    st.builds(LinearCoefficients, *[st.floats(0, 1e-2, allow_subnormal=False)] * 7),
    st.sampled_from(AttentionWork),
)


@given(models, st.lists(chunks, max_size=6), chunks)
def test_one_more_request_never_makes_a_step_faster(
    model: LinearModel, batch: list[tuple[int, int]], more: tuple[int, int]
) -> None:
    assert model.predict(make_shape(*batch, more)) >= model.predict(make_shape(*batch))


@given(models, st.lists(chunks, max_size=6), chunks, st.integers(1, 4096), st.integers(0, 4096))
def test_more_tokens_or_a_longer_context_never_make_a_step_faster(
    model: LinearModel,
    batch: list[tuple[int, int]],
    chunk: tuple[int, int],
    more_tokens: int,
    more_context: int,
) -> None:
    """Tokens are added to a chunk, since a decode that becomes a chunk is charged differently."""
    new, prior = chunk
    base = model.predict(make_shape(*batch, (new, prior)))
    assert model.predict(make_shape(*batch, (new, prior + more_context))) >= base
    if new > 1:
        assert model.predict(make_shape(*batch, (new + more_tokens, prior))) >= base


@given(models, st.lists(chunks, max_size=6), st.integers(0, 50), st.integers(1, 50))
def test_more_swapping_never_makes_a_step_faster(
    model: LinearModel, batch: list[tuple[int, int]], blocks: int, more: int
) -> None:
    few = model.predict(make_shape(*batch, num_swapped_blocks=blocks))
    assert model.predict(make_shape(*batch, num_swapped_blocks=blocks + more)) >= few


@given(models, chunks)
def test_a_prefill_alone_is_a_step_with_nothing_else(
    model: LinearModel, chunk: tuple[int, int]
) -> None:
    expected = model.predict(make_shape(chunk))
    assert model.predict_prefill(*chunk) == expected
    assert model.predict_prefill(*chunk) == expected, "the second answer is remembered"
    assert model.predict_prefill(chunk[0]) == model.predict(make_shape((chunk[0], 0)))


def test_predicting_changes_neither_shape_nor_model() -> None:
    model, shape = make_model(), make_shape((16, 3), (1, 7))
    first = model.predict(shape)
    model.observe(shape, 99.0)
    assert model.predict(shape) == first
    assert shape == make_shape((16, 3), (1, 7))


@pytest.mark.parametrize("value", [-1e-9, math.nan, math.inf])
@pytest.mark.parametrize("index", range(7))
def test_a_coefficient_is_finite_and_never_negative(index: int, value: float) -> None:
    values = [1.0] * 7
    values[index] = value
    name = list(LinearCoefficients.__dataclass_fields__)[index]
    with pytest.raises(ValueError, match=f"coefficient {name} must be finite"):
        LinearCoefficients(*values)


@pytest.mark.cost
def test_a_prediction_takes_microseconds(benchmark: BenchmarkFixture) -> None:
    shape = make_shape((512, 1024), *((1, 300),) * 100)
    model = make_model()
    seconds = benchmark(model.predict, shape)
    assert seconds > 0
    assert benchmark.stats.stats.median < slowed(MAX_PREDICT_S)


def test_a_slower_device_is_slower_in_everything() -> None:
    model = make_model()
    slower = scaled(model, 1.5)
    for chunks in (((512, 1024),), ((1, 300),) * 8, ((64, 0), (1, 40))):
        shape = make_shape(*chunks)
        assert slower.predict(shape) == pytest.approx(1.5 * model.predict(shape))
    assert slower.provenance["scaled_by"] == "1.5"
