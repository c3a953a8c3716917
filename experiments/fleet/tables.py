"""Tables of the shares in time, with intervals over the windows of the trace."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from experiments.markdown import table


def tables(results: pd.DataFrame) -> str:
    """Return a table for each question and rate, and what router and policy are worth in it."""
    parts = []
    for (question, rate), found in results.groupby(["question", "rate"], sort=False):
        parts.append(f"## {question}, {rate:g} requests/s\n\n{_one(found)}\n\n{_worth(found)}\n")
    return "\n".join(parts)


def interval(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval (Student's t over the windows)."""
    if len(values) < 2:
        return float(values.mean()), math.inf
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def _one(found: pd.DataFrame) -> str:
    """Return the shares in time, a row for each router and a column for each policy."""
    policies = list(dict.fromkeys(found["policy"]))
    rows = [
        (f"`{router}`", *(_cell(of_router, policy) for policy in policies))
        for router, of_router in found.groupby("router", sort=False)
    ]
    return table(["router", *(f"`{policy}`" for policy in policies)], rows, 1)


def _worth(found: pd.DataFrame) -> str:
    """Return what the best router gains over round robin, and `goodput` over `fcfs` behind it."""
    wide = found.pivot_table(index="window", columns=["policy", "router"], values="in_time")
    lines = []
    for policy in ("fcfs", "goodput"):
        best = str(wide[policy].mean().idxmax())
        gain = wide[policy][best] - wide[policy]["round_robin"]
        lines.append(f"best router over round robin, `{policy}`: `{best}` {_points(gain)}")
    gain = wide["goodput"]["round_robin"] - wide["fcfs"]["round_robin"]
    lines.append(f"`goodput` over `fcfs`, both behind round robin: {_points(gain)}")
    return "\n".join(f"- {line}" for line in lines)


def _cell(found: pd.DataFrame, policy: str) -> str:
    mean, half = interval(found[found["policy"] == policy]["in_time"].to_numpy())
    return f"{100 * mean:.1f} ± {100 * half:.1f} %"


def _points(gain: pd.Series[float]) -> str:
    mean, half = interval(gain.to_numpy())
    return f"{100 * mean:+.1f} ± {100 * half:.1f} points"
