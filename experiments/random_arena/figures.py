"""The figure of the page: how the ratios are distributed over the cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.random_arena.contenders import FLAGSHIP
from experiments.random_arena.results import Row
from slosched.evaluate.plots.style import (
    WIDTH_IN,
    legend_above,
    log_axis,
    look,
    reference_line,
    tidy,
)

MOST_RATIO = 8.0
"""The largest ratio drawn and averaged, and the reciprocal of the least: a rival that serves next
to nothing would give any number."""


def clipped(ratio: float) -> float:
    return min(max(ratio, 1 / MOST_RATIO), MOST_RATIO)


def ratios(rows: Sequence[Row], metric: str, group: str, ours: str = FLAGSHIP) -> list[Row]:
    """Return a metric's ratios to the best of a class, one for each cell that was not void."""
    return [
        {**ratio, "name": row["name"]}
        for row in rows
        for ratio in row.get("ratios", [])
        if (ratio["metric"], ratio["class"], ratio["ours"]) == (metric, group, ours)
    ]


def distribution(
    rows: Sequence[Row], metrics: Sequence[str], groups: Sequence[str]
) -> Figure | None:
    """Draw the share of cells whose ratio is at most x, a panel for each metric; None if none."""
    if not any("ratios" in row for row in rows):
        return None
    figure = Figure(figsize=(WIDTH_IN, 3.2), layout="constrained")
    panels = cast("list[Axes]", list(figure.subplots(1, len(metrics), sharey=True)))
    for axes, metric in zip(panels, metrics, strict=True):
        tidy(axes)
        for i, group in enumerate(groups):
            found = [r["ratio"] for r in ratios(rows, metric, group) if not math.isnan(r["ratio"])]
            values = np.sort([clipped(ratio) for ratio in found])
            if len(values):
                shares = np.arange(1, len(values) + 1) / len(values)
                style = look(i + 1).line(drawstyle="steps-post", markersize=3)
                axes.plot(values, shares, label=f"over the best {group}", **style)
        log_axis(axes)
        reference_line(axes, "", x=1.0)
        axes.set(title=metric, ylim=(0, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.supxlabel(f"{FLAGSHIP} over the best of the class", fontsize=9)
    panels[0].set_ylabel("cells with at most this ratio")
    legend_above(figure)
    return figure
