"""Figures of a comparison: what happened to the requests under each policy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from slosched.evaluate.plots.style import (
    BLACK,
    BLUE,
    ORANGE,
    SKY,
    folded,
    legend_above,
    single_axes,
)
from slosched.metrics import Summary


def outcome_bars(summaries: Mapping[str, Summary]) -> Figure:
    """Draw the shares of the offered requests that were good, late, rejected or never finished."""
    names = named(summaries)
    bars, figure, axes = _bars(names)
    parts = {
        "good": ([s.num_good for s in summaries.values()], BLUE, ""),
        "late": ([s.num_finished - s.num_good for s in summaries.values()], ORANGE, "///"),
        "rejected": ([s.num_rejected for s in summaries.values()], "#D9D9D9", "..."),
        "aborted or unfinished": (
            [s.num_aborted + s.num_unfinished for s in summaries.values()],
            "#6E6E6E",
            "xxx",
        ),
    }
    offered = np.array([s.num_offered for s in summaries.values()], dtype=np.float64)
    left = np.zeros(len(names))
    for label, (counts, colour, hatch) in parts.items():
        if not any(counts):
            continue
        share = np.array(counts) / offered
        style: dict[str, Any] = {
            "color": colour,
            "hatch": hatch,
            "edgecolor": "white",
            "linewidth": 0.6,
        }
        axes.barh(bars, share, left=left, height=0.68, label=label, **style)
        left += share
    for row, summary in enumerate(summaries.values()):
        axes.text(1.01, row, f"{summary.attainment:.1%} good", va="center", fontsize=9)
    axes.set(xlim=(0, 1), xlabel="share of offered requests")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.invert_yaxis()
    axes.grid(visible=False)
    legend_above(figure)
    return figure


def goodput_bars(summaries: Mapping[str, Summary]) -> Figure:
    """Draw good requests/s of each policy, with a mark at the rate that was offered to it."""
    names = named(summaries)
    bars, figure, axes = _bars(names)
    goodputs = [s.good_requests_per_s for s in summaries.values()]
    offered = [s.offered_requests_per_s for s in summaries.values()]
    best = max((g for g in goodputs if not math.isnan(g)), default=0.0)
    colours = [BLUE if goodput == best else SKY for goodput in goodputs]
    axes.barh(bars, goodputs, height=0.68, color=colours)
    positions = np.arange(len(names))
    axes.vlines(offered, positions - 0.42, positions + 0.42, colors=BLACK, linewidth=2)
    for row, goodput in enumerate(goodputs):
        if not math.isnan(goodput):
            inside = goodput > 0.5 * best
            style: dict[str, Any] = {"color": "white", "ha": "right"} if inside else {}
            if inside and colours[row] == SKY:
                style["color"] = BLACK
            axes.text(goodput, row, f" {goodput:.2f} ", va="center", fontsize=9, **style)
        else:
            axes.text(0, row, " no rate: all arrived at once", va="center", fontsize=9)
    axes.plot([], [], "|", color=BLACK, markersize=11, markeredgewidth=2, label="offered")
    axes.set(xlabel="good requests/s")
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.set_ylim(len(names) - 0.5, -0.5)  # also those without a bar
    axes.grid(visible=False)
    legend_above(figure)
    return figure


def _bars(names: Sequence[str]) -> tuple[list[str], Figure, Axes]:
    """Return the names folded, and a figure that has room for a bar beside each."""
    bars = [folded(name) for name in names]
    num_lines = max(bar.count("\n") + 1 for bar in bars)
    return bars, *single_axes(height_in=0.9 + max(0.42, 0.19 * num_lines) * len(names))


def named(by_policy: Mapping[str, object]) -> Sequence[str]:
    """Return the names of the policies of a figure.  Raises ValueError if there is none."""
    if not by_policy:
        raise ValueError("there is no policy to draw")
    return list(by_policy)
