"""Robust least squares on relative errors, and how well the data determine each parameter."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from slosched.perfmodel.columns import Array

_ERROR_SCALE = 0.02
"""Relative error above which a residual counts linearly instead of squared."""
_PRIOR_WEIGHT = 0.01
"""Pull of a parameter towards its start, per factor of e; only strong enough to break ties."""
_UNDETERMINED = 1.0
"""Standard error, in factors of e, from which on a value counts as not determined by the data."""

_DIFFERENCE = float(np.sqrt(np.finfo(np.float64).eps))
"""Step of a numeric derivative, as a share of the value: half of a float's digits."""
_EDGE = 1e-3
"""Distance from an end of its range, in factors of e, below which only the range holds a value."""
_BEST_CLOCK = 1e-6
"""Least relative error assumed of measured times, however well a synthetic time fits."""


@dataclass(frozen=True)
class Parameter:
    """A positive number to be fitted, on a logarithmic scale."""

    name: str
    start: float
    low: float
    high: float
    weight: float = _PRIOR_WEIGHT
    """Pull towards `start`; higher where the physics is known and the data may not show it."""


@dataclass(frozen=True)
class Estimate:
    """A fitted number with its 95 % confidence interval."""

    name: str
    value: float
    low: float
    high: float
    is_determined: bool
    """False if the value is not a result of the measurements.

    Either they hardly depend on it, so that the value is its default, or they push it to an end of
    its range, so that the value is that end.
    """


@dataclass(frozen=True)
class Solution:
    values: Array
    estimates: tuple[Estimate, ...]
    cost: float


def solve(
    predict: Callable[[Array], Array],
    measured_s: Array,
    parameters: Sequence[Parameter],
    *,
    weights: Array | None = None,
    num_starts: int = 3,
    seed: int = 0,
) -> Solution:
    """Find the parameters that bring what `predict` returns closest to `measured_s`, of shape (n,).

    `predict` gets k guesses at once, of shape (p, k, 1), so that a parameter times a column of n
    steps is of shape (k, n), as its result must be. A derivative needs a guess for each parameter,
    and asking for all together takes a fraction of the time.

    The loss is soft-L1 of the relative error, so that a tenth of spoilt rows does not bend the fit.
    Several starts are tried, because smooth maxima have local minima.
    """
    from scipy.optimize import least_squares  # half a second to import, only for a fit

    start = np.log([p.start for p in parameters])
    low = np.log([p.low for p in parameters])
    high = np.log([p.high for p in parameters])
    prior = _ERROR_SCALE * np.array([p.weight for p in parameters])
    weight = np.ones(len(measured_s)) if weights is None else weights

    def residuals(xs: Array) -> Array:
        relative = (predict(np.exp(xs).T[:, :, None]) - measured_s) / measured_s
        return np.hstack([weight * relative, prior * (xs - start)])

    def jacobian(x: Array) -> Array:
        step = _DIFFERENCE * np.where(x < 0, -1.0, 1.0) * np.maximum(1.0, np.abs(x))
        step = np.where((low <= x + step) & (x + step <= high), step, -step)
        at, *beside = residuals(np.vstack([x, x + np.diag(step)]))
        slopes = (np.array(beside) - at) / ((x + step) - x)[:, None]
        return np.asarray(slopes.T)

    def residuals_at(x: Array) -> Array:
        return np.asarray(residuals(x[None])[0])

    rng = np.random.default_rng(seed)
    best = None
    for i in range(num_starts):
        jitter = rng.normal(0, 0.4, len(start)) if i else 0.0
        x = np.clip(start + jitter, low + 1e-6, high - 1e-6)
        found = least_squares(
            residuals_at,
            x,
            jac=jacobian,
            bounds=(low, high),
            loss="soft_l1",
            f_scale=_ERROR_SCALE,
            x_scale="jac",
            max_nfev=200,
        )
        if best is None or found.cost < best.cost:
            best = found
    assert best is not None
    return Solution(
        np.exp(best.x),
        tuple(_estimates(parameters, best.x, residuals, len(measured_s))),
        float(best.cost),
    )


def _estimates(
    parameters: Sequence[Parameter], x: Array, residuals: Callable[[Array], Array], n: int
) -> list[Estimate]:
    """Estimate Gauss-Newton intervals from the data alone, without the pull towards the start."""
    step = 1e-4
    at, *beside = residuals(np.vstack([x, x + step * np.eye(len(x))]))[:, :n]
    jacobian = (np.array(beside) - at).T / step
    sigma = max(1.4826 * float(np.median(np.abs(at))), _BEST_CLOCK)
    _, seen, directions = np.linalg.svd(jacobian / sigma, full_matrices=True)
    information = np.pad(seen, (0, len(x) - len(seen))) ** 2
    # A prior this weak leaves a determined value as it is and makes the inverse exist.
    spread = np.sqrt((directions**2 / (information + 1e-2)[:, None]).sum(axis=0))
    return [
        Estimate(
            name=p.name,
            value=math.exp(value),
            low=math.exp(value - 1.96 * s),
            high=math.exp(value + 1.96 * s),
            is_determined=s < _UNDETERMINED
            and math.log(p.low) + _EDGE < value < math.log(p.high) - _EDGE,
        )
        for p, value, s in zip(parameters, x.tolist(), spread.tolist(), strict=True)
    ]
