"""Means over the parts of a trace, with intervals, and the errors of the predictions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Mean:
    """The mean of a number over the parts of a trace."""

    value: float
    reach: float
    """Half of the 95 % interval, by Student's t over the parts; NaN for a single part."""


@dataclass(frozen=True)
class Gain:
    """The gain of a policy over vLLM's own scheduler, on the same parts of a trace."""

    rate: float
    system: str
    more: Mean
    times: float

    @property
    def verdict(self) -> str:
        if self.more.value - self.more.reach > 0:
            return "surely more"
        if self.more.value + self.more.reach < 0:
            return "surely fewer"
        return "not surely more"


def mean_of(values: npt.NDArray[np.float64]) -> Mean:
    n = len(values)
    if n < 2:
        return Mean(float(values.mean()), float("nan"))
    error = float(values.std(ddof=1)) / n**0.5
    return Mean(float(values.mean()), float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error)


def gains(runs: pd.DataFrame, column: str = "good_requests_per_s") -> list[Gain]:
    """Return a gain for each rate and policy of one setup."""
    wide = runs.pivot_table(index=["rate", "window"], columns="system", values=column)
    [baseline] = [name for name in wide.columns if name.startswith("vLLM ")]
    found = []
    for rate, part in wide.groupby(level="rate"):
        for policy in wide.columns.drop(baseline):
            both = part[[policy, baseline]].dropna()
            more = mean_of((both[policy] - both[baseline]).to_numpy(float))
            times = float(both[policy].sum()) / max(float(both[baseline].sum()), 1e-9)
            found.append(Gain(float(str(rate)), str(policy), more, times))
    return found


def prediction_errors(runs: pd.DataFrame, predictions: pd.DataFrame) -> pd.DataFrame:
    """Return a row by setup, rate and system: attainment measured and predicted, and the points."""
    keys = ["setup", "rate", "window", "system"]
    both = runs[[*keys, "attainment"]].merge(
        predictions[[*keys, "attainment"]], on=keys, suffixes=("", "_predicted")
    )
    means = both.groupby(["setup", "rate", "system"], as_index=False)[
        ["attainment", "attainment_predicted"]
    ].mean()
    points = 100 * (means["attainment_predicted"] - means["attainment"])
    means["points"] = points.round(2)  # files keep six digits
    return means


def same_ranking(errors: pd.DataFrame, tie_points: float = 2.0) -> bool:
    """Tell whether predictions order the systems of one setup and rate as measurements do.

    For two systems that are measured within `tie_points` of each other either order is right.
    """
    rows = errors[["attainment", "attainment_predicted"]].to_numpy(float)
    for i, (measured, predicted) in enumerate(rows):
        for other, other_predicted in rows[i + 1 :]:
            is_tie = abs(measured - other) <= tie_points / 100
            if not is_tie and (measured - other) * (predicted - other_predicted) <= 0:
                return False
    return True
