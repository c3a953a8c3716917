"""The fit of gradient-boosted trees by scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slosched.perfmodel.boosting import FEATURES, BoostedModel, Tree, Trees
from slosched.perfmodel.columns import Array
from slosched.perfmodel.fit_layered import FormUnfitError, columns, fit_swap, whole_steps
from slosched.perfmodel.measurement import Measurement
from slosched.perfmodel.solve import Estimate

_MIN_STEPS = 200
_NUM_TREES = 150
_MAX_LEAVES = 15
_MIN_LEAF_STEPS = 5
_UPPER = 0.99
_CALIBRATED = 0.2
"""Share of the steps that do not grow the upper trees, and say by how much these are too low."""


def fit_boosting(
    measurements: Sequence[Measurement], _provenance: Mapping[str, str], seed: int
) -> tuple[BoostedModel, tuple[Estimate, ...]]:
    """Fit trees to the logarithm of the time: one set to its mean, one to its 99 % quantile.

    The quantile is raised so far that 99 % of the steps that it was not fitted to stay below it
    (conformalised quantile regression; Romano, Patterson and Candès, NeurIPS 2019). Raises
    FormUnfitError if there are too few steps.
    """
    steps = whole_steps(measurements)
    if len(steps) < _MIN_STEPS:
        raise FormUnfitError(
            f"trees know nothing but the steps they were fitted to: they need at least "
            f"{_MIN_STEPS} different batches, and {len(steps)} are there to be fitted"
        )
    c, seconds = columns(steps)
    features = np.column_stack([getattr(c, name) for name in FEATURES])
    order = np.random.default_rng(seed).permutation(len(steps))
    num_calibrated = max(1, round(_CALIBRATED * len(steps)))
    calibrated, grown = order[:num_calibrated], order[num_calibrated:]
    expected = _grow(features, seconds, seed, loss="squared_error")
    upper = _grow(features[grown], seconds[grown], seed, loss="quantile", quantile=_UPPER)
    exceeded = [
        took / upper.seconds(sums)
        for took, sums in zip(
            seconds[calibrated].tolist(), features[calibrated].tolist(), strict=True
        )
    ]
    raised = max(1.0, float(np.quantile(exceeded, _UPPER, method="higher")))
    model = BoostedModel(expected, Trees(raised * upper.baseline_s, upper.trees))
    swap = fit_swap(model, measurements)
    return BoostedModel(model.expected, model.upper, swap.value), (swap,)


def _grow(features: Array, seconds: Array, seed: int, **loss: Any) -> Trees:
    """Grow trees that never fall as a feature grows, and turn them into factors."""
    from sklearn.ensemble import HistGradientBoostingRegressor  # seconds to import, only for this
    from threadpoolctl import threadpool_limits

    regressor = HistGradientBoostingRegressor(
        **loss,
        max_iter=_NUM_TREES,
        max_leaf_nodes=_MAX_LEAVES,
        min_samples_leaf=_MIN_LEAF_STEPS,
        monotonic_cst=[1] * len(FEATURES),
        early_stopping=False,
        random_state=seed,
    )
    # A few hundred steps are too few to share: threads would only wait for each other.
    with threadpool_limits(1):
        regressor.fit(features, np.log(seconds))
    # scikit-learn hands out the trees' nodes under private names alone; a test compares both.
    baseline = float(np.ravel(regressor._baseline_prediction)[0])
    trees = tuple(_tree(stage[0].nodes) for stage in regressor._predictors)
    return Trees(math.exp(baseline), trees)


def _tree(nodes: Any) -> Tree:
    """Turn scikit-learn's nodes into a tree of factors that never falls as a feature grows.

    scikit-learn grows such trees, and then sets the leaves of a quantile's trees anew without
    regard to that. A tree never falls if its leaves rise from left to right, so the leaves are
    moved as little as that needs (isotonic regression).
    """
    from scipy.optimize import isotonic_regression  # slow to import, only for a fit

    leaves = _leaves(nodes, 0)
    rising = isotonic_regression(
        [float(nodes[i]["value"]) for i in leaves],
        weights=[float(nodes[i]["count"]) for i in leaves],
    )
    factors = {i: math.exp(value) for i, value in zip(leaves, rising.x.tolist(), strict=True)}

    def build(index: int) -> Tree:
        if index in factors:
            return factors[index]
        node = nodes[index]
        low, high = build(int(node["left"])), build(int(node["right"]))
        return int(node["feature_idx"]), float(node["num_threshold"]), low, high

    return build(0)


def _leaves(nodes: Any, index: int) -> list[int]:
    """Return the indices of the leaves, from left to right."""
    node = nodes[index]
    if node["is_leaf"]:
        return [index]
    return _leaves(nodes, int(node["left"])) + _leaves(nodes, int(node["right"]))
