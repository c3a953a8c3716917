"""Regression trees without a formula: the accuracy that the sums of a shape allow.

They are a reference for the forms, not models to schedule with: a query takes milliseconds, and
shapes beyond those that were fitted get the time of the nearest one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from slosched.core import BatchShape
from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.measurement import Measurement, Part

REFERENCES = ("forest", "boosting")


class _Regressor(Protocol):
    def fit(self, x: Array, y: Array) -> object: ...

    def predict(self, x: Array) -> Array: ...


class TreesModel:
    """Trees over the sums of a shape, fitted to the logarithm of the time."""

    def __init__(self, regressor: _Regressor) -> None:
        self._regressor = regressor

    def predict_many(self, measurements: Sequence[Measurement]) -> Array:
        """Return the predicted seconds of each measurement, from one query for all."""
        matrix = Columns([m.shape for m in measurements]).matrix()
        return np.exp(np.asarray(self._regressor.predict(matrix)))

    def predict(self, shape: BatchShape) -> float:
        return float(np.exp(self._regressor.predict(Columns([shape]).matrix())[0]))


def fit_trees(name: str, measurements: Sequence[Measurement], seed: int = 0) -> TreesModel:
    """Fit a random forest of 200 trees, or gradient boosting over 400, to the whole steps."""
    from sklearn.ensemble import (  # seconds to import, only for a reference
        GradientBoostingRegressor,
        RandomForestRegressor,
    )

    steps = [m for m in measurements if m.part is Part.STEP]
    regressor: _Regressor
    if name == "forest":
        regressor = RandomForestRegressor(n_estimators=200, random_state=seed)
    elif name == "boosting":
        regressor = GradientBoostingRegressor(
            n_estimators=400, max_depth=5, learning_rate=0.05, subsample=0.8, random_state=seed
        )
    else:
        raise ValueError(f"no reference {name!r}; there are {', '.join(REFERENCES)}")
    regressor.fit(Columns([m.shape for m in steps]).matrix(), np.log([m.seconds for m in steps]))
    return TreesModel(regressor)
