"""Paired comparisons: shares of good requests by block, and the intervals of their differences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

FloatArray = npt.NDArray[np.float64]
_LEVEL = 0.95


def blocks_of(cell: pd.DataFrame, spec: str) -> FloatArray:
    """Return the shares of good requests of all windows and blocks under a policy."""
    texts = cell[cell["policy"] == spec].sort_values("window")["blocks"]
    return np.array([float(share) for text in texts for share in text.split()])


def against(differences: FloatArray) -> str:
    """Return the mean of paired differences with its 95 % interval (Student's t)."""
    mean = float(differences.mean())
    count = len(differences)
    margin = float(stats.t.ppf((1 + _LEVEL) / 2, count - 1) * differences.std(ddof=1) / count**0.5)
    return f"{mean:+.1f} [{mean - margin:+.1f}, {mean + margin:+.1f}]"
