"""The look of every figure: colours, line styles, axes.

A figure must be read in grey and by the colour-blind.  So no two curves of a figure differ by
colour alone: each has its own pair of dash and marker, and the colours (Okabe and Ito's, which the
colour-blind tell apart) come in an order in which neighbours differ in lightness, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, GREY, BLACK = "#56B4E9", "#CC79A7", "#8A8A8A", "#000000"
COLOURS = (BLUE, ORANGE, BLACK, VERMILION, SKY, GREEN, PURPLE)
DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)))
"""One fewer than markers, so that the pairs repeat only after 42 curves."""
MARKERS = "osD^vPX"
WIDTH_IN = 8.0


@dataclass(frozen=True, slots=True)
class Look:
    """How one curve of a figure is told from the others."""

    colour: str
    dash: Any
    marker: str

    def line(self, **more: Any) -> dict[str, Any]:
        """Keywords for a line that has a marker at each of its points, or `markevery` so many."""
        look = {"color": self.colour, "linestyle": self.dash, "marker": self.marker}
        return {**look, "linewidth": 1.6, "markersize": 5.5, "markeredgewidth": 0, **more}


def look(index: int) -> Look:
    """Of the curve with this number; the same in every figure of a report."""
    return Look(
        COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)]
    )


def single_axes(height_in: float) -> tuple[Figure, Axes]:
    """A figure of one panel."""
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots()
    tidy(axes)
    return figure, axes


def tidy(axes: Axes) -> None:
    """The look of all our axes: no box, a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)


def log_axis(axes: Axes, which: Literal["x", "y"] = "x") -> None:
    """A logarithmic axis whose ticks are plain numbers: 0.2, 0.5, 1."""
    smallest = axes.dataLim.minposx if which == "x" else axes.dataLim.minposy
    if not math.isfinite(smallest):  # nothing is drawn, of which there is no logarithm
        axes.set(**{f"{which}lim": (0.1, 10)})
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    few_decades = high < 300 * low
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few_decades else (1.0,)))


def legend_above(figure: Figure, **more: Any) -> None:
    """One legend for all panels, over them; five names in a row."""
    seen: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            seen.setdefault(label, handle)
    look_of: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": min(5, len(seen)), **more}
    figure.legend(seen.values(), seen.keys(), loc="outside upper center", handlelength=3, **look_of)


def reference_line(
    axes: Axes,
    text: str,
    *,
    x: float | None = None,
    y: float | None = None,
    at_end: bool = False,
) -> None:
    """A thin dashed black line across the axes at `x` or `y`, with what it stands for.

    The text of a horizontal one stands at its right end: attainments fall to the right.  That of a
    vertical one stands right of it, or left where it is `at_end` of the axes.
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
