"""Tests of the bisection over the lattice of rates: it ends, and it ends at the crossing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.evaluate.capacity.rates import Lattice, Search

LATTICE = Lattice.between(0.1, 100.0, 0.02)
places = st.integers(LATTICE.lowest, LATTICE.highest)


def searched(search: Search, attainment: Callable[[int], float]) -> dict[int, float]:
    known: dict[int, float] = {}
    while asked := search.next_places(known):
        assert search.num_left(known) > 0
        assert not set(asked) & known.keys()
        assert all(LATTICE.lowest <= k <= LATTICE.highest for k in asked)
        known |= {k: attainment(k) for k in asked}
    assert search.num_left(known) == 0
    return known


@given(
    low=st.floats(1e-3, 1e3),
    times=st.floats(2.0, 1e4),
    precision=st.sampled_from([0.01, 0.02, 0.1, 0.5]),
)
def test_no_rate_is_outside_of_what_may_be_tried(
    low: float, times: float, precision: float
) -> None:
    lattice = Lattice.between(low, times * low, precision)
    assert low <= lattice.rate(lattice.lowest) <= lattice.rate(lattice.highest) <= times * low
    assert lattice.rate(lattice.lowest - 1) < low
    assert lattice.rate(lattice.highest + 1) > times * low


@pytest.mark.parametrize("k", [-300, -7, 1, 2, 35, 150])
def test_a_limit_that_is_a_rate_of_the_lattice_is_tried_itself(k: int) -> None:
    rate = LATTICE.rate(k)
    assert Lattice.between(rate, 2 * rate, 0.02).lowest == k
    assert Lattice.between(rate / 2, rate, 0.02).highest == k


def test_a_range_without_any_rate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"precision 0.5 is between 1.6 and 2.1"):
        Lattice.between(1.6, 2.1, 0.5)


@given(guess=places, knee=places, width=st.sampled_from([1, 4]))
def test_a_curve_that_falls_is_bracketed(guess: int, knee: int, width: int) -> None:
    search = Search(LATTICE, 0.9, guess, width=width)
    known = searched(search, lambda k: 1.0 if k <= knee else 0.0)
    low, high = search.bracket(known)
    assert len(known) <= 24
    if knee == LATTICE.highest:
        assert (low, high) == (LATTICE.highest, None)
    else:
        assert low is not None
        assert high is not None
        assert low <= knee < high <= low + width
        assert low == LATTICE.lowest or low - 1 in known
        assert high == LATTICE.highest or high + 1 in known


@given(guess=places)
def test_a_target_that_is_never_reached_ends_at_the_lowest_rate(guess: int) -> None:
    known = searched(Search(LATTICE, 0.9, guess), lambda _: 0.5)
    assert LATTICE.lowest in known
    assert Search(LATTICE, 0.9, guess).bracket(known)[0] is None


def test_a_rate_with_just_the_target_reaches_it() -> None:
    assert Search(LATTICE, 0.9, 5).bracket({0: 1.0, 1: 0.9, 2: 0.5}) == (1, 2)


@given(guess=places, seed=st.integers(0, 999))
def test_a_wavy_curve_is_searched_to_an_end(guess: int, seed: int) -> None:
    noise = np.random.default_rng(seed).uniform(-0.1, 0.1, 400)

    def attainment(k: int) -> float:
        return 1 / (1 + 2.0 ** ((k - 60) / 10)) + noise[k]  # negative indices count from the end

    search = Search(LATTICE, 0.8, guess)
    low, high = search.bracket(searched(search, attainment))
    assert low is None or high is None or high - low == 1


def test_what_another_target_measured_is_used() -> None:
    def attainment(k: int) -> float:
        return 1 - max(0, k - 40) / 50

    known = searched(Search(LATTICE, 0.9, 20), attainment)
    more = Search(LATTICE, 0.99, 20)
    num_more = 0
    while asked := more.next_places(known):
        num_more += len(asked)
        known |= {k: attainment(k) for k in asked}
    assert num_more <= 5


def test_rates_are_the_same_whatever_the_ends() -> None:
    wide, narrow = Lattice.between(0.01, 1000, 0.02), Lattice.between(5, 50, 0.02)
    assert wide.rate(100) == narrow.rate(100) == 7.24465
    assert 5 <= narrow.rate(narrow.lowest) < narrow.rate(narrow.highest) <= 50
    assert narrow.nearest(1e9) == narrow.highest
    assert narrow.nearest(7.3) == 100


@pytest.mark.parametrize(
    ("low", "high", "precision", "said"),
    [(1, 2, 0.0, "precision"), (1, 2, 0.9, "precision"), (2, 1, 0.02, "2 and 1"), (0, 1, 0.1, "0")],
)
def test_a_search_without_room_is_refused(
    low: float, high: float, precision: float, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        Lattice.between(low, high, precision)
