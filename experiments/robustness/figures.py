"""Figures of the page: loss against strength, one figure for each kind of disturbance."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.robustness.kinds import Kind
from slosched.evaluate.plots.style import WIDTH_IN, legend_above, look, reference_line, tidy

_SPREAD = 0.5
"""The share of the distance between two strengths over which the policies are spread."""
_SEEN_POINTS = (-2.0, 4.0)
"""The least range of every axis in points, so that small losses do not look large."""


def short(policy: str) -> str:
    """Return a policy's name without its options, which all figures and tables leave out."""
    return policy.partition(":")[0]


def loss_figure(kind: Kind, losses: pd.DataFrame) -> Figure:
    """Draw the losses of one kind: a row of panels for each variant, a column for each workload."""
    workloads = list(dict.fromkeys(losses["workload"]))
    num_rows = len(kind.variants)
    figure = Figure(figsize=(WIDTH_IN * 1.25, 0.9 + 2.6 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, len(workloads), squeeze=False, sharey="row")
    for row, variant in enumerate(kind.variants):
        for column, workload in enumerate(workloads):
            chosen = (losses["variant"] == variant) & (losses["workload"] == workload)
            _panel(grid[row, column], kind, losses[chosen])
            title = f"{workload}, {variant}" if variant else workload
            grid[row, column].set_title(title, fontsize=10)
        grid[row, 0].set_ylabel("points lost")
    for axes in grid[-1]:
        axes.set_xlabel(kind.axis)
    legend_above(figure)
    return figure


def _panel(axes: Axes, kind: Kind, losses: pd.DataFrame) -> None:
    tidy(axes)
    policies = list(dict.fromkeys(losses["policy"]))
    strengths = sorted({float(strength) for strength in losses["strength"]})
    shifts = np.linspace(-_SPREAD / 2, _SPREAD / 2, len(policies))
    for i, policy in enumerate(policies):
        rows = losses[losses["policy"] == policy].sort_values("strength")
        lost = rows["loss_points"].to_numpy(float)
        reach = np.abs(rows[["low_points", "high_points"]].to_numpy(float).T - lost)
        places = np.array([strengths.index(s) for s in rows["strength"]]) + shifts[i]
        style = look(i).line(linewidth=0.9, alpha=0.95)
        axes.errorbar(places, lost, reach, label=short(policy), elinewidth=1, capsize=2, **style)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, _SEEN_POINTS[0]), max(high, _SEEN_POINTS[1]))
    axes.set_xlim(-0.6, len(strengths) - 0.4)
    axes.set_xticks(range(len(strengths)), [kind.label(s) for s in strengths])
    reference_line(axes, "", y=0.0)
