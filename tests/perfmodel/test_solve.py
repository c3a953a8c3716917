"""The solver recovers parameters in spite of noise and outliers, and says how well."""

from __future__ import annotations

import numpy as np
import pytest

from slosched.perfmodel.columns import Array
from slosched.perfmodel.solve import Parameter, solve

X = np.geomspace(1, 1000, 60)
TRUTH = np.array([2.0, 0.01])
PARAMETERS = (Parameter("constant_s", 0.5, 1e-3, 1e3), Parameter("slope_s", 0.1, 1e-6, 10.0))


def line(values: Array) -> Array:
    return np.asarray(values[0] + values[1] * X)


def noisy(seed: int, outliers: float = 0.0) -> Array:
    """Return times with 2 % noise; a share of the rows takes three times as long."""
    rng = np.random.default_rng(seed)
    seconds = line(TRUTH) * rng.normal(1, 0.02, len(X))
    spoilt = rng.choice(len(X), round(outliers * len(X)), replace=False)
    seconds[spoilt] *= 3
    return np.asarray(seconds)


def test_without_noise_the_parameters_are_found() -> None:
    solution = solve(line, line(TRUTH), PARAMETERS)
    assert solution.values == pytest.approx(TRUTH, rel=1e-3)
    assert [e.name for e in solution.estimates] == ["constant_s", "slope_s"]
    assert all(e.is_determined for e in solution.estimates)
    assert [e.value for e in solution.estimates] == pytest.approx(solution.values.tolist())


def test_a_tenth_of_spoilt_rows_does_not_bend_the_fit() -> None:
    for seed in range(10):
        solution = solve(line, noisy(seed, outliers=0.1), PARAMETERS)
        assert solution.values == pytest.approx(TRUTH, rel=0.03)


@pytest.mark.parametrize("outliers", [0.0, 0.1])
def test_the_intervals_cover_the_truth_as_often_as_they_say(outliers: float) -> None:
    hits = np.zeros(2)
    widths = np.zeros(2)
    for seed in range(40):
        found = solve(line, noisy(seed, outliers), PARAMETERS, num_starts=1).estimates
        hits += [e.low <= true <= e.high for e, true in zip(found, TRUTH, strict=True)]
        widths += [e.high / e.low - 1 for e in found]
    assert (hits >= 0.85 * 40).all()
    assert (widths / 40 < 0.1).all(), "and they are not wide"


def test_what_the_data_do_not_depend_on_is_said_to_be_undetermined() -> None:
    third = Parameter("unseen_s", 7.0, 1e-3, 1e3)
    solution = solve(lambda v: line(v[:2]), noisy(0), (*PARAMETERS, third))
    assert [e.is_determined for e in solution.estimates] == [True, True, False]
    assert solution.values[2] == pytest.approx(7.0, rel=1e-3), "its default"


def test_two_parameters_that_only_matter_together_are_both_undetermined() -> None:
    pair = (Parameter("a_s", 1.0, 1e-3, 1e3), Parameter("b", 1.0, 1e-3, 1e3))
    solution = solve(lambda v: v[0] * v[1] * X, 6 * X, pair)
    assert not any(e.is_determined for e in solution.estimates)
    assert solution.values[0] * solution.values[1] == pytest.approx(6, rel=1e-3)


def test_a_value_stays_within_its_bounds() -> None:
    bounded = (PARAMETERS[0], Parameter("slope_s", 0.002, 1e-6, 0.005))
    solution = solve(line, line(TRUTH), bounded)
    assert solution.values[1] <= 0.005 * (1 + 1e-9)


def test_physics_that_the_data_hardly_show_stays_at_its_start() -> None:
    """With weak data, a parameter with a large weight moves less than one with a small weight."""

    def predict(v: Array) -> Array:
        return np.asarray(2.0 + 1e-5 * v[0] * X)

    seconds = noisy(1)
    moved = [
        abs(np.log(solve(predict, seconds, [Parameter("p", 1.0, 1e-3, 1e3, w)]).values[0]))
        for w in (0.01, 1000.0)
    ]
    assert moved[1] < 0.5 * moved[0]


def test_rows_of_more_weight_pull_more() -> None:
    constant = [Parameter("constant_s", 1.0, 0.1, 10.0)]
    seconds = np.array([1.0, 1.01])
    found = [
        solve(lambda v: v[0] * np.ones(2), seconds, constant, weights=np.array(w)).values[0]
        for w in ((10.0, 1.0), (1.0, 10.0))
    ]
    assert found[0] < 1.002 < 1.008 < found[1]


def test_the_seed_decides_the_starts() -> None:
    first, second = (solve(line, noisy(0), PARAMETERS, seed=5) for _ in range(2))
    assert first.values.tolist() == second.values.tolist()


def test_the_guesses_of_a_derivative_are_asked_for_in_one_call() -> None:
    """This is what makes a fit fast: a call takes much longer than the arithmetic in it."""
    asked: list[int] = []

    def predict(guesses: Array) -> Array:
        asked.append(guesses.shape[1])
        return line(guesses)

    solve(predict, noisy(0), PARAMETERS, num_starts=1)
    at_a_point_and_beside_it = 1 + len(PARAMETERS)
    assert set(asked) == {1, at_a_point_and_beside_it}
    assert asked.count(at_a_point_and_beside_it) > 1, (
        "in the search, too, not only for the intervals"
    )


def test_a_derivative_does_not_look_beyond_the_ends_of_a_range() -> None:
    """The times ask for 6, and no value above 2 is allowed."""
    seen: list[list[float]] = []

    def predict(guesses: Array) -> Array:
        seen.append(guesses[0, :, 0].tolist())
        return np.asarray(guesses[0] * X)

    [found] = solve(predict, 6 * X, [Parameter("slope_s", 1.0, 0.1, 2.0)], num_starts=1).values
    assert found == pytest.approx(2.0, rel=1e-6)
    *during_the_search, _for_the_intervals = seen
    assert max(map(max, during_the_search)) < 2.0 + 1e-12
