"""Tests of resampling, the curve that never rises, its crossing, and the truth of intervals."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from slosched.evaluate.statistics import (
    Interval,
    antitonic,
    block_weights,
    crossing,
    interval,
    rises,
)

shares = st.lists(st.integers(0, 100).map(lambda n: n / 100), min_size=1, max_size=12)


@given(shares, st.data())
def test_the_curve_that_never_rises_is_the_least_squares_one(
    values: list[float], data: st.DataObject
) -> None:
    sizes = data.draw(
        st.lists(st.integers(1, 9), min_size=len(values), max_size=len(values)), label="sizes"
    )
    fitted = antitonic(np.array(values), np.array(sizes, dtype=float))
    expected = isotonic_regression(values, weights=sizes, increasing=False).x
    assert fitted == pytest.approx(expected, abs=1e-12)


def test_what_falls_already_stays_as_it_is_to_the_bit() -> None:
    values = np.array([1.0, 0.9, 0.5])
    assert antitonic(values, np.ones(3)).tolist() == values.tolist()


def test_many_curves_at_once_are_each_its_own() -> None:
    curves = np.random.default_rng(0).random((50, 7))
    together = antitonic(curves, np.ones_like(curves))
    assert together == pytest.approx(np.array([antitonic(c, np.ones(7)) for c in curves]))


def test_a_crossing_is_interpolated() -> None:
    rates = np.array([1.0, 2.0, 4.0])
    curves = np.array(
        [
            [1.0, 0.9, 0.5],  # at the middle rate
            [1.0, 0.95, 0.85],  # half-way from 2 to 4
            [0.8, 0.7, 0.1],  # below from the start
            [1.0, 1.0, 0.9],  # never below
            [0.9, 0.9, 0.0],  # the last rate that reaches it counts
        ]
    )
    assert crossing(rates, curves, 0.9) == pytest.approx([2.0, 3.0, 1.0, 4.0, 2.0])


def test_a_crossing_needs_no_second_rate() -> None:
    assert crossing(np.array([3.0]), np.array([[1.0], [0.2]]), 0.9) == pytest.approx([3.0, 3.0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_one_seed_fewer_is_drawn_and_as_many_blocks_as_each_has(sizes: list[int]) -> None:
    seed_of = np.repeat(np.arange(len(sizes)), sizes)
    weights = block_weights(seed_of, 64, seed=1)
    assert weights.shape == (64, sum(sizes))
    drawn = np.array([weights[:, seed_of == i].sum(axis=1) / n for i, n in enumerate(sizes)])
    assert (drawn.sum(axis=0) == max(1, len(sizes) - 1)).all()
    assert (drawn == drawn.round()).all()
    assert (weights == block_weights(seed_of, 64, seed=1)).all()


def trials(between: float, within: float, seeds: int = 5, blocks: int = 8) -> npt.NDArray[np.bool_]:
    """Tell for each of 200 trials whether the interval of a mean of blocks holds the true mean."""
    rng = np.random.default_rng(0)
    weights = block_weights(np.repeat(np.arange(seeds), blocks), 500, seed=0)
    held = []
    for _ in range(200):
        values = np.repeat(rng.normal(0, between, seeds), blocks)
        values += rng.normal(0, within, seeds * blocks)
        held.append(0.0 in interval(weights @ values / weights.sum(axis=1), values.mean(), seeds))
    return np.array(held)


def test_intervals_hold_the_truth_whether_seeds_differ_or_not() -> None:
    assert trials(between=0.0, within=1.0).mean() >= 0.95
    assert trials(between=1.0, within=1.0).mean() >= 0.93


def test_blocks_alone_would_not_do() -> None:
    """Show why there are two stages: without the resampled seeds one interval in three misses."""
    rng = np.random.default_rng(0)
    weights = block_weights(np.zeros(40, dtype=np.int64), 500, seed=0)
    held = 0
    for _ in range(200):
        values = np.repeat(rng.normal(size=5), 8) + rng.normal(size=40)
        held += 0.0 in interval(weights @ values / weights.sum(axis=1), values.mean(), 1)
    assert held / 200 < 0.8


def test_an_interval_has_its_ends() -> None:
    assert 1.0 in Interval(1.0, 2.0)
    assert 2.0 in Interval(1.0, 2.0)
    assert 2.1 not in Interval(1.0, 2.0)


def test_a_rise_is_told_from_noise() -> None:
    rng = np.random.default_rng(0)
    assert rises(np.arange(10.0) + rng.normal(0, 1, 10))
    assert not rises(np.arange(10.0)[::-1])
    assert not rises(np.full(10, 3.0))
    assert not rises(np.array([1.0, 2.0]))
    assert sum(rises(rng.normal(size=10)) for _ in range(500)) / 500 < 0.03
