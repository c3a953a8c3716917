"""The look of every figure: colours, line styles, axes.

A figure must be readable in grey and for colour-blind people.  So no two curves of a figure differ
by colour alone: each has its own pair of dash and marker.  The colours are those of Okabe and Ito,
which colour-blind people can distinguish, in an order in which neighbours differ in lightness too.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, GREY, BLACK = "#56B4E9", "#CC79A7", "#8A8A8A", "#000000"
COLOURS = (BLUE, ORANGE, BLACK, VERMILION, SKY, GREEN, PURPLE)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)))
"""There is one dash fewer than markers, so that the pairs repeat only after 42 curves."""
MARKERS = "osD^vPX"
WIDTH_IN = 8.0
_LEGEND_WIDTH, _HANDLE_WIDTH = 120, 8
"""Characters that fit into a row of a legend, and those that the line beside a name takes."""
_LINE_IN = 0.18
_PARTS = re.compile(r".[^ ,+:]*[,:]?")
"""The parts between which a name may be folded: words, wrappers and options."""


@dataclass(frozen=True, slots=True)
class Look:
    """The colour, dash and marker that distinguish one curve of a figure from the others."""

    colour: str
    dash: Any
    marker: str

    def line(self, **more: Any) -> dict[str, Any]:
        """Return keywords for a line with a marker at each point, or as `markevery` says."""
        look = {"color": self.colour, "linestyle": self.dash, "marker": self.marker}
        return {**look, "linewidth": 1.6, "markersize": 5.5, "markeredgewidth": 0, **more}


def look(index: int) -> Look:
    """Return the look of the curve with this number, the same in every figure of a report."""
    return Look(
        COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)]
    )


def single_axes(height_in: float) -> tuple[Figure, Axes]:
    """Make a figure of one panel."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots()
    tidy(axes)
    return figure, axes


def tidy(axes: Axes) -> None:
    """Give axes the common look: no box, and a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)


def log_axis(axes: Axes, which: Literal["x", "y"] = "x") -> None:
    """Make an axis logarithmic, with plain numbers at its ticks: 0.2, 0.5, 1."""
    smallest = axes.dataLim.minposx if which == "x" else axes.dataLim.minposy
    if not math.isfinite(smallest):  # nothing is drawn that the axis could fit
        axes.set(**{f"{which}lim": (0.1, 10)})
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    few_decades = high < 300 * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few_decades else (1.0,)))


def folded(name: str, width: int = 30) -> str:
    """Fold a long name, as of a policy with options behind a router, where its parts end."""
    lines = [""]
    for part in _PARTS.findall(name):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part if lines[-1] else part.lstrip()
    return "\n".join(line.rstrip() for line in lines)


def legend_above(figure: Figure, **more: Any) -> None:
    """Draw one legend for all panels above them, with at most five names in a row.

    The figure grows by what the legend is higher than two lines.
    """
    seen: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    labels = [folded(label, _LEGEND_WIDTH // 2) for label in seen]
    longest = max((len(line) for label in labels for line in label.split("\n")), default=0)
    num_columns = max(1, min(5, len(seen), _LEGEND_WIDTH // (longest + _HANDLE_WIDTH)))
    num_lines = max((label.count("\n") + 1 for label in labels), default=0)
    num_lines *= math.ceil(len(seen) / num_columns)
    width_in, height_in = figure.get_size_inches()
    figure.set_size_inches(width_in, height_in + _LINE_IN * max(0, num_lines - 2))
    look_of: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": num_columns, **more}
    figure.legend(seen.values(), labels, loc="outside upper center", handlelength=3, **look_of)


def reference_line(
    axes: Axes,
    text: str,
    *,
    x: float | None = None,
    y: float | None = None,
    at_end: bool = False,
) -> None:
    """Draw a thin dashed black line across the axes at `x` or `y`, and its `text`.

    The text of a horizontal line is at its right end, as attainments fall to the right.  That of a
    vertical line is on its right, or on its left if the line is `at_end` of the axes.
    """
    style: dict[str, Any] = {"color": BLACK, "linewidth": 1, "linestyle": (0, (2, 2))}
    note: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8}
    if x is not None:
        axes.axvline(x, **style)
        side: dict[str, Any] = {"ha": "right", "xytext": (-3, 0)} if at_end else {"xytext": (3, 0)}
        where = ("data", "axes fraction")
        axes.annotate(text, xy=(x, 0.03), xycoords=where, **side, **note)
    if y is not None:
        axes.axhline(y, **style)
        axes.annotate(
            text,
            xy=(0.995, y),
            xytext=(0, 3),
            xycoords=("axes fraction", "data"),
            ha="right",
            **note,
        )
