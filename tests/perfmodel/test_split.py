"""The split of measurements into those that are fitted and those that judge."""

from __future__ import annotations

import pytest
from factories import make_model
from hypothesis import given
from hypothesis import strategies as st
from synthetic_steps import Chunks, make_measurements, random_batches

from slosched.perfmodel import Measurement
from slosched.perfmodel.errors import regimes
from slosched.perfmodel.split import covering, folds, on_grid

STEPS = make_measurements(random_batches(240), make_model(), swapped_blocks=(0, 0, 0, 7))


@given(st.integers(1, 60), st.integers(2, 10), st.integers(0, 99))
def test_folds_are_disjoint_and_hold_everything(count: int, num_folds: int, seed: int) -> None:
    parts = folds(STEPS[:count], num_folds, seed)
    assert sorted(i for part in parts for i in part) == list(range(count))
    assert len(parts) == min(num_folds, count)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_every_fold_holds_its_share_of_every_regime() -> None:
    for part in folds(STEPS, 5, seed=0):
        for regime in regimes(STEPS):
            total = sum(m.regime == regime for m in STEPS)
            assert abs(sum(STEPS[i].regime == regime for i in part) - total / 5) <= 1


@pytest.mark.parametrize("count", [20, 100, 239])
def test_a_covering_part_keeps_every_regime_and_repeats_nothing(count: int) -> None:
    chosen = covering(STEPS, count)
    assert len(set(chosen)) == len(chosen) <= count
    assert len(chosen) >= 0.8 * count
    assert {STEPS[i].regime for i in chosen} == {"decode", "mixed", "prefill", "swap"}


def test_a_few_decode_steps_are_not_drowned_by_many_mixed_ones() -> None:
    batches = random_batches(3000)
    decodes = [b for b in batches if all(new == 1 for new, _ in b)][:20]
    mixed = [b for b in batches if len({new == 1 for new, _ in b}) == 2]
    steps = make_measurements((*decodes, *mixed), make_model())
    chosen = covering(steps, 100)
    assert sum(steps[i].regime == "decode" for i in chosen) >= 10


def test_the_extremes_are_covered() -> None:
    """Two steps far from two hundred similar ones are both chosen."""
    alike: list[Chunks] = [((500 + i, 1000),) for i in range(200)]
    steps = make_measurements([*alike, ((2, 0),), ((8192, 60_000),)], make_model())
    assert {200, 201} <= set(covering(steps, 5))


def test_all_are_chosen_where_that_many_are_asked_for() -> None:
    assert covering(STEPS, 240) == covering(STEPS, 1000) == list(range(240))


@pytest.mark.parametrize(
    ("chunks", "is_on"),
    [
        (((512, 0),), True),
        (((512, 1024), (1, 64), (1, 64)), True),
        (((1, 64),) * 3, False),
        (((48, 0),), False),
        (((512, 96),), False),
        (((1, 100),), False),
    ],
)
def test_on_the_grid_every_size_is_a_power_of_two(chunks: Chunks, is_on: bool) -> None:
    assert on_grid(Measurement(chunks, 1.0)) is is_on
