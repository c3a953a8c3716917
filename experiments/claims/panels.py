"""The figures of the page: measures over the setting, a panel for each and a line for each rule."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from experiments.engines.study import over_windows
from slosched.evaluate.plots.style import WIDTH_IN, legend_above, look, tidy


def panels(
    frame: pd.DataFrame, x: str, x_label: str, lines: str, measures: Mapping[str, str]
) -> Figure:
    """Draw each column of `measures` over the column `x`, with its median and range over windows.

    `measures` maps columns to titles, and each value of the column `lines` becomes a line.
    """
    figure = Figure(figsize=(WIDTH_IN, 2.9), layout="constrained")
    places = list(dict.fromkeys(frame[x]))
    for axes, (column, label) in zip(
        figure.subplots(1, len(measures)), measures.items(), strict=True
    ):
        tidy(axes)
        for i, (name, of_line) in enumerate(frame.groupby(lines, sort=False)):
            found = over_windows(of_line, [x], column)
            at = [places.index(place) for place in found[x]]
            style = look(i)
            axes.plot(at, found["median"], label=str(name), **style.line())
            axes.fill_between(
                at, found["min"], found["max"], color=style.colour, alpha=0.15, linewidth=0
            )
        axes.set_xticks(range(len(places)), [str(place) for place in places])
        axes.set_ylim(bottom=0)
        axes.set_title(label, fontsize=10)
        axes.set_xlabel(x_label)
    legend_above(figure)
    return figure
