"""The fit of the linear formula, by non-negative least squares of the relative error."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slosched.perfmodel.columns import Array, Columns
from slosched.perfmodel.errors import FitError
from slosched.perfmodel.linear import TILE_TOKENS, AttentionWork, LinearCoefficients, LinearModel
from slosched.perfmodel.measurement import Measurement
from slosched.perfmodel.solve import Estimate

_DEPENDENT = 1e-7
"""Share of a column left unexplained by the others, below which it counts as dependent."""


def fit_linear(
    steps: Sequence[Measurement],
    attention: AttentionWork = AttentionWork.EXACT,
) -> tuple[LinearModel, tuple[Estimate, ...]]:
    """Fit C1 … C7, with 95 % confidence intervals.

    A coefficient that the steps do not determine is zero, and its estimate says so.
    """
    from scipy.optimize import nnls  # half a second to import, which only a fit should pay

    seconds = np.array([m.seconds for m in steps])
    weighted = features(Columns([m.shape for m in steps]), attention) / seconds[:, None]
    used = independent_columns(weighted)
    # Columns are scaled to one so that the solver's tolerance means the same for each of them.
    scale = np.linalg.norm(weighted[:, used], axis=0)
    values = np.zeros(weighted.shape[1])
    values[used] = nnls(weighted[:, used] / scale, np.ones(len(steps)))[0] / scale
    spread = np.zeros_like(values)
    spread[used] = _standard_errors(weighted[:, used], 1 - weighted @ values)
    names = tuple(LinearCoefficients.__dataclass_fields__)
    model = LinearModel(
        LinearCoefficients(**dict(zip(names, values.tolist(), strict=True))), attention
    )
    return model, tuple(
        Estimate(name, value, max(0.0, value - 1.96 * s), value + 1.96 * s, bool(known))
        for name, value, s, known in zip(
            names, values.tolist(), spread.tolist(), used.tolist(), strict=True
        )
    )


def features(c: Columns, attention: AttentionWork) -> Array:
    """Return the values that C1 … C7 are multiplied with, of shape (n, 7)."""
    exact = attention is AttentionWork.EXACT
    return np.column_stack(
        [
            c.num_tokens,
            c.prefill_attention_tokens if exact else c.squared_chunk_tokens,
            c.decode_context_tokens,
            np.ceil(c.num_tokens / TILE_TOKENS),
            c.num_decodes > 0,
            c.num_swapped_blocks,
            np.ones(len(c)),
        ]
    )


def independent_columns(matrix: Array) -> np.ndarray:
    """Tell for each column whether it is neither zero nor a combination of those kept before it.

    The constant comes first, then the columns in order, so that C1 takes what it could share with
    C4. Raises FitError if fewer than two columns are independent.
    """
    norms = np.linalg.norm(matrix, axis=0)
    order = [matrix.shape[1] - 1, *range(matrix.shape[1] - 1)]
    used = np.zeros(matrix.shape[1], dtype=bool)
    basis: list[Array] = []
    for i in order:
        if norms[i] == 0:
            continue
        rest = matrix[:, i] / norms[i]
        for direction in basis:
            rest = rest - (rest @ direction) * direction
        left = float(np.linalg.norm(rest))
        if left > _DEPENDENT:
            used[i] = True
            basis.append(rest / left)
    if used.sum() < 2:
        raise FitError(
            f"all {len(matrix)} measurements are of batches of the same shape, which determine no "
            "coefficient; profile batches of different sizes"
        )
    return used


def _standard_errors(matrix: Array, residuals: Array) -> Array:
    freedom = max(1, len(matrix) - matrix.shape[1])
    variance = float(residuals @ residuals) / freedom
    return np.asarray(np.sqrt(variance * np.diag(np.linalg.pinv(matrix.T @ matrix))))
