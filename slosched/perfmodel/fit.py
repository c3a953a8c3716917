"""Fit the latency model to measurements, and say how wrong it is on steps it never saw."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slosched.core import BatchShape, LatencyModel, SloschedError
from slosched.perfmodel.linear import (
    TILE_TOKENS,
    AttentionWork,
    LinearCoefficients,
    LinearModel,
)
from slosched.perfmodel.measurement import Measurement, Profile

_MIN_MEASUREMENTS = 16


class FitError(SloschedError):
    """The measurements cannot determine a model."""


@dataclass(frozen=True)
class ErrorReport:
    """Relative errors of predictions, in percent of the measured time."""

    count: int
    mape: float
    """Mean of |error|."""
    p50: float
    p90: float
    p99: float
    under_p95: float
    """95th percentile of under-prediction: what makes a deadline be missed; never below 0."""
    under_p99: float


@dataclass(frozen=True)
class FitReport:
    model: LinearModel
    train: ErrorReport
    held_out: ErrorReport
    by_regime: Mapping[str, ErrorReport] = field(default_factory=dict)
    """Held-out errors of each kind of step."""
    undetermined: tuple[str, ...] = ()
    """Coefficients that the data say nothing about; they are zero in the model."""
    held_out_measurements: tuple[Measurement, ...] = ()


def features(shape: BatchShape, attention: AttentionWork) -> tuple[float, ...]:
    """What C1 … C7 are multiplied with."""
    tokens = shape.num_tokens
    exact = attention is AttentionWork.EXACT
    return (
        tokens,
        shape.prefill_attention_tokens if exact else shape.squared_chunk_tokens,
        shape.decode_context_tokens,
        -(-tokens // TILE_TOKENS),
        float(shape.num_decodes > 0),
        shape.num_swapped_blocks,
        1.0,
    )


def fit_linear(
    profile: Profile,
    *,
    attention: AttentionWork = AttentionWork.EXACT,
    held_out_fraction: float = 0.25,
    seed: int = 0,
    balance_regimes: bool = False,
) -> FitReport:
    """Least squares on the *relative* error with coefficients >= 0.

    A quarter of the measurements, drawn within each regime, is held out and never fitted; the
    errors reported are theirs, of the very model that is returned.  With `balance_regimes` all
    decode steps together weigh as much as all mixed ones, however many of each were measured: for
    grids that are full of combinations which a server rarely runs.
    """
    from scipy.optimize import nnls  # half a second to import, which only a fit should pay

    train, held_out = split(profile.measurements, held_out_fraction, seed)
    matrix = np.array([features(m.shape, attention) for m in train], dtype=float)
    seconds = np.array([m.seconds for m in train])
    used = np.any(matrix != 0, axis=0)
    coefficients = np.zeros(matrix.shape[1])
    # Columns are scaled to one so that the solver's tolerance means the same for each of them.
    weights = _regime_weights(train) if balance_regimes else np.ones(len(train))
    weighted = matrix[:, used] * (weights / seconds)[:, None]
    scale = np.linalg.norm(weighted, axis=0)
    coefficients[used] = nnls(weighted / scale, weights)[0] / scale
    names = tuple(LinearCoefficients.__dataclass_fields__)
    values = dict(zip(names, coefficients.tolist(), strict=True))
    model = LinearModel(LinearCoefficients(**values), attention, provenance=profile.provenance)
    report = evaluate(model, held_out)
    model = LinearModel(
        model.coefficients,
        attention,
        provenance=profile.provenance,
        held_out_error={
            "count": report.count,
            "mape": report.mape,
            "p99": report.p99,
            "under_p99": report.under_p99,
        },
    )
    return FitReport(
        model=model,
        train=evaluate(model, train),
        held_out=report,
        by_regime=evaluate_by_regime(model, held_out),
        undetermined=tuple(name for name, known in zip(names, used, strict=True) if not known),
        held_out_measurements=tuple(held_out),
    )


def _regime_weights(measurements: Sequence[Measurement]) -> NDArray[np.float64]:
    """Of each residual, so that the squares of every regime sum to the same."""
    counts = Counter(m.regime for m in measurements)
    return np.array([counts[m.regime] ** -0.5 for m in measurements])


def split(
    measurements: Sequence[Measurement], held_out_fraction: float, seed: int
) -> tuple[list[Measurement], list[Measurement]]:
    """Training and held-out measurements; each regime gives the same share, in stable order."""
    if len(measurements) < _MIN_MEASUREMENTS:
        raise FitError(
            f"{len(measurements)} measurements are too few for a fit with seven coefficients and a "
            f"held-out share; profile at least {_MIN_MEASUREMENTS} batches"
        )
    if not 0 < held_out_fraction < 1:
        raise ValueError(f"held_out_fraction must lie between 0 and 1, not {held_out_fraction}")
    rng = np.random.default_rng(seed)
    held: set[int] = set()
    for regime in sorted({m.regime for m in measurements}):
        members = [i for i, m in enumerate(measurements) if m.regime == regime]
        count = round(len(members) * held_out_fraction)
        held.update(rng.choice(members, size=count, replace=False).tolist())
    train = [m for i, m in enumerate(measurements) if i not in held]
    return train, [measurements[i] for i in sorted(held)]


def relative_errors(
    model: LatencyModel, measurements: Sequence[Measurement]
) -> NDArray[np.float64]:
    """(predicted - measured) / measured, of each."""
    measured = np.array([m.seconds for m in measurements])
    predicted = np.array([model.predict(m.shape) for m in measurements])
    return np.asarray((predicted - measured) / measured, dtype=np.float64)


def evaluate(model: LatencyModel, measurements: Sequence[Measurement]) -> ErrorReport:
    if not measurements:
        raise FitError("there is nothing to evaluate the model on")
    errors = 100 * relative_errors(model, measurements)
    size = np.abs(errors)
    under = np.maximum(0.0, -errors)
    p50, p90, p99 = np.percentile(size, (50, 90, 99)).tolist()
    under_p95, under_p99 = np.percentile(under, (95, 99)).tolist()
    return ErrorReport(len(errors), float(size.mean()), p50, p90, p99, under_p95, under_p99)


def evaluate_by_regime(
    model: LatencyModel, measurements: Sequence[Measurement]
) -> dict[str, ErrorReport]:
    regimes = sorted({m.regime for m in measurements})
    return {r: evaluate(model, [m for m in measurements if m.regime == r]) for r in regimes}
