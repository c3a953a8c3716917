"""A table over a count: lines between its knots, never falling, and going on after the last."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.perfmodel.table import Knots, Table, monotone_table

counts_and_times = st.lists(
    st.tuples(st.integers(0, 5000), st.floats(0, 10)),
    min_size=1,
    max_size=12,
    unique_by=lambda p: p[0],
).map(lambda pairs: (sorted(c for c, _ in pairs), sorted(t for _, t in pairs)))


def test_between_knots_lies_a_straight_line_and_before_the_first_its_value() -> None:
    table = Table((10, 20, 40), (1.0, 2.0, 2.5))
    assert table.at(np.array([0, 10, 15, 20, 30, 40])).tolist() == [1, 1, 1.5, 2, 2.25, 2.5]


@pytest.mark.parametrize(
    ("counts", "times_s", "slope_s"),
    [
        ((5,), (3.0,), 0.0),
        ((0, 10), (1.0, 2.0), 0.1),
        ((0, 10, 20), (0.0, 1.0, 3.0), 0.2),
        ((0, 1, 10, 30), (0.0, 5.0, 6.0, 10.0), 5 / 29),
        ((0, 1, 10, 20, 30), (0.0, 5.0, 5.0, 6.0, 7.0), 0.1),
    ],
)
def test_beyond_the_last_knot_the_slope_of_the_upper_half_goes_on(
    counts: tuple[int, ...], times_s: tuple[float, ...], slope_s: float
) -> None:
    table = Table(counts, times_s)
    assert table.slope_s == pytest.approx(slope_s)
    last = counts[-1]
    beyond = table.at(np.array([last, last + 7, last + 700]))
    assert beyond == pytest.approx(times_s[-1] + slope_s * np.array([0, 7, 700]))


@given(counts_and_times)
def test_a_table_never_falls_and_goes_through_its_knots(
    knots: tuple[list[int], list[float]],
) -> None:
    counts, times_s = knots
    table = Table(tuple(counts), tuple(times_s))
    everywhere = table.at(np.arange(0, 12_000))
    assert (np.diff(everywhere) >= -1e-9).all()
    assert table.at(np.array(counts)).tolist() == pytest.approx(times_s)


@pytest.mark.parametrize(
    ("counts", "times_s", "message"),
    [
        ((), (), "at least one: 0 counts, 0 times"),
        ((1, 2), (0.1,), "2 counts, 1 times"),
        ((2, 1), (0.1, 0.2), r"must rise from 0 or more: \(2, 1\)"),
        ((1, 1), (0.1, 0.2), r"must rise from 0 or more: \(1, 1\)"),
        ((-1, 1), (0.1, 0.2), "must rise from 0 or more"),
        ((1, 2), (0.2, 0.1), "must not fall or be negative"),
        ((1, 2), (-0.2, 0.1), "must not fall or be negative"),
    ],
)
def test_what_is_no_table_says_why(
    counts: tuple[int, ...], times_s: tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Table(counts, times_s)


def test_the_closest_monotone_table_to_noisy_times() -> None:
    """A stair with 3 % noise that falls in places is smoothed to errors below the noise."""
    rng = np.random.default_rng(3)
    counts = np.repeat(np.arange(1, 200, 4), 3)
    exact_s = 0.01 + 2e-4 * np.ceil(counts / 64)
    noisy_s = exact_s * rng.normal(1, 0.03, len(counts))
    table = monotone_table(counts.tolist(), noisy_s.tolist())
    assert table.counts == tuple(range(1, 200, 4)), "equal counts become one knot"
    errors = np.abs(table.at(counts.astype(float)) / exact_s - 1)
    assert errors.mean() < 0.5 * np.abs(noisy_s / exact_s - 1).mean()


def test_times_that_never_fall_are_kept_as_they_are() -> None:
    table = monotone_table([4, 1, 2], [0.4, 0.1, 0.2])
    assert table.counts == (1, 2, 4)
    assert table.times_s == pytest.approx((0.1, 0.2, 0.4))


def test_a_fall_is_flattened_to_a_relative_mean() -> None:
    """The mean of 1 and 2 is near 1, since weights are 1/t²."""
    table = monotone_table([1, 2], [2.0, 1.0])
    assert table.times_s == pytest.approx((1.2, 1.2))


@given(counts_and_times, counts_and_times)
def test_many_tables_of_the_same_counts_are_read_at_once_as_each_is_alone(
    one: tuple[list[int], list[float]], other: tuple[list[int], list[float]]
) -> None:
    """To the last bit: a fit must judge exactly the model that it then returns."""
    counts, times_s = one[0], (one[1], [t + 1 for t in one[1]])
    places = np.array([0, *other[0], *counts, counts[-1] + 1], dtype=float)
    read = Knots(counts, places).read(np.array(times_s))
    for at_once_s, alone_s in zip(read, times_s, strict=True):
        assert at_once_s.tolist() == Table(tuple(counts), tuple(alone_s)).at(places).tolist()
