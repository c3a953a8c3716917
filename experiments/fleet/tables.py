"""Tables of the shares in time, with intervals over the windows of the trace."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import stats

from experiments.markdown import table

_INTRODUCTION = """# Routers and policies on four replicas

Made by `python -m experiments.fleet report` from results.csv.  Each figure is the share of requests
in time, the mean of the windows of the trace with its 95 % interval.  Gains are paired: both sides
played the same windows.  What the questions are is in questions.py.

No router and no scheduler serves more in time than the bound says ([why](../../docs/bounds.md)).
It counts all requests of the windows, and the other figures those after the warm-up.  With prefix
caches there is none.  Made by `python -m experiments.fleet ceilings`.
"""


def tables(results: pd.DataFrame, ceilings: pd.DataFrame) -> str:
    """Return a table for each question and rate, and what router and policy are worth in it.

    `ceilings` has the bounds of the same questions, where there are any.
    """
    parts = [_INTRODUCTION]
    for (question, rate), found in results.groupby(["question", "rate"], sort=False):
        is_its = (ceilings["question"] == question) & (ceilings["rate"] == rate)
        most = ceilings[is_its]
        heading = f"## {question}, {rate:g} requests/s"
        parts.append(f"{heading}\n\n{_one(found, most)}\n\n{_worth(found)}{_lasting(most)}\n")
    return "\n".join(parts)


def interval(values: npt.NDArray[np.floating[Any]]) -> tuple[float, float]:
    """Return the mean and the half width of its 95 % interval (Student's t over the windows)."""
    if len(values) < 2:
        return float(values.mean()), math.inf
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def _one(found: pd.DataFrame, most: pd.DataFrame) -> str:
    """Return the shares in time, a row for each router and a column for each policy.

    `most` has the bound of each window; without any there is no row for it.
    """
    policies = list(dict.fromkeys(found["policy"]))
    rows = [
        (f"`{router}`", *(_cell(of_router, policy) for policy in policies))
        for router, of_router in found.groupby("router", sort=False)
    ]
    if len(most):
        bound = _share(most["most_in_time"].to_numpy(dtype=float))
        rows.append(("any (bound)", *[f"≤ {bound}"] * len(policies)))
    return table(["router", *(f"`{policy}`" for policy in policies)], rows, 1)


def _worth(found: pd.DataFrame) -> str:
    """Return what the best router gains over round robin, and `goodput` over `fcfs` behind it."""
    wide = found.pivot_table(index="window", columns=["policy", "router"], values="in_time")
    lines = []
    for policy in ("fcfs", "goodput"):
        if "round_robin" in wide[policy]:
            means = {str(router): float(wide[policy][router].mean()) for router in wide[policy]}
            del means["round_robin"]
            best = max(means, key=lambda router: means[router])
            gain = wide[policy][best] - wide[policy]["round_robin"]
            lines.append(f"`{best}` over round robin, `{policy}` in the engines: {_points(gain)}")
    base = found["router"].iloc[0]
    gain = wide["goodput"][base] - wide["fcfs"][base]
    lines.append(f"`goodput` over `fcfs` in the engines, both behind `{base}`: {_points(gain)}")
    return "\n".join(f"- {line}" for line in lines)


def _lasting(most: pd.DataFrame) -> str:
    """Return the load that no fleet of these replicas sustains; nothing if it is not known."""
    if not len(most):
        return ""
    mean, half = interval(most["most_per_s"].to_numpy(dtype=float))
    return (
        f"\n- more than {mean:.0f} ± {half:.0f} such requests/s, without end, no router and no "
        "scheduler can serve on these replicas (L1)"
    )


def _cell(found: pd.DataFrame, policy: str) -> str:
    return _share(found[found["policy"] == policy]["in_time"].to_numpy(dtype=float))


def _share(values: npt.NDArray[np.floating[Any]]) -> str:
    mean, half = interval(values)
    return f"{100 * mean:.1f} ± {100 * half:.1f} %"


def _points(gain: pd.Series[float]) -> str:
    mean, half = interval(gain.to_numpy(dtype=float))
    num_better = int((gain > 0).sum())
    better = f"better in {num_better} of {len(gain)} windows"
    return f"{100 * mean:+.1f} ± {100 * half:.1f} points ({better})"
