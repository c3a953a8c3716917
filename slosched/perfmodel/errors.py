"""The errors of a latency model on measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slosched.core import LatencyModel, SloschedError
from slosched.perfmodel.columns import Array
from slosched.perfmodel.measurement import Measurement

LONG_CONTEXT = "long context"


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
    max: float
    under_p95: float
    """95th percentile of under-prediction, which is what makes requests miss deadlines; at least 0.
    """
    under_p99: float
    bias: float
    """Mean of the signed error; below 0 if the predicted times are too short."""


def predictions(model: LatencyModel, measurements: Sequence[Measurement]) -> Array:
    """Return the predicted seconds of each measurement."""
    return np.array([model.predict(m.shape) for m in measurements])


def report_errors(predicted_s: Array, measurements: Sequence[Measurement]) -> ErrorReport:
    if not measurements:
        raise FitError("there is nothing to evaluate the model on")
    measured = np.array([m.seconds for m in measurements])
    errors = 100 * (predicted_s - measured) / measured
    size = np.abs(errors)
    under = np.maximum(0.0, -errors)
    p50, p90, p99 = np.percentile(size, (50, 90, 99)).tolist()
    under_p95, under_p99 = np.percentile(under, (95, 99)).tolist()
    return ErrorReport(
        count=len(errors),
        mape=float(size.mean()),
        p50=p50,
        p90=p90,
        p99=p99,
        max=float(size.max()),
        under_p95=under_p95,
        under_p99=under_p99,
        bias=float(errors.mean()),
    )


def evaluate(model: LatencyModel, measurements: Sequence[Measurement]) -> ErrorReport:
    return report_errors(predictions(model, measurements), measurements)


def by_regime(predicted_s: Array, measurements: Sequence[Measurement]) -> Mapping[str, ErrorReport]:
    """Return the errors on decode, prefill, mixed, swap and long-context steps, see `groups`."""
    return {
        name: report_errors(predicted_s[members], [measurements[i] for i in members])
        for name, members in groups(measurements).items()
    }


def groups(measurements: Sequence[Measurement]) -> dict[str, list[int]]:
    """Return the indices of the steps of each regime, and of the steps with a long context.

    A context is long if it is longer than half of the longest one. A long-context step is listed in
    its regime, too.
    """
    found = {
        regime: [i for i, m in enumerate(measurements) if m.regime == regime]
        for regime in regimes(measurements)
    }
    contexts = np.array([m.shape.max_context_tokens for m in measurements])
    found[LONG_CONTEXT] = np.flatnonzero(2 * contexts > contexts.max()).tolist()
    return found


def regimes(measurements: Sequence[Measurement]) -> list[str]:
    return sorted({m.regime for m in measurements})
