"""The figure of what fleets cost and what they serve in time."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter

from slosched.evaluate.plots.style import BLUE, ORANGE, reference_line, single_axes

_NAME: dict[str, Any] = {
    "textcoords": "offset points",
    "va": "top",
    "fontsize": 7,
    # White around the letters, since the intervals of other fleets may pass behind them.
    "path_effects": [withStroke(linewidth=3, foreground="white")],
}
"""How the name of a fleet is drawn."""


def cost_frontier(fleets: pd.DataFrame, target: float) -> Figure:
    """Draw attainment against the price of fleets, each with its interval and its name.

    `fleets` has a row for each fleet, with fleet, price_per_hour, attainment, low and high.  The
    line joins those that have more requests in time than every cheaper one.
    """
    figure, axes = single_axes(height_in=4.6)
    ordered = fleets.sort_values(["price_per_hour", "attainment"], ascending=[True, False])
    shares, prices = ordered["attainment"], ordered["price_per_hour"]
    errors = [shares - ordered["low"], ordered["high"] - shares]
    marks: dict[str, Any] = {
        "linestyle": "",
        "marker": "o",
        "markersize": 4.5,
        "linewidth": 1.0,
        "capsize": 2,
    }
    axes.errorbar(prices, shares, yerr=errors, color=BLUE, **marks)
    best = ordered[shares > shares.cummax().shift(fill_value=-1.0)]
    axes.step(best["price_per_hour"], best["attainment"], where="post", color=ORANGE, linewidth=1.6)
    axes.margins(x=0.08)  # room for the name of the target beside the dearest fleet
    axes.set_ylim(max(-0.02, float(shares.min()) - 0.05), 1.02)
    label_height = 0.05 * (axes.get_ylim()[1] - axes.get_ylim()[0])
    named = zip(best["fleet"], best["price_per_hour"], best["attainment"], strict=True)
    for fleet, price, share in named:
        crosses = 0 <= share - target < label_height
        at = (price, target if crosses else share)  # below the line that it would cross
        axes.annotate(fleet, at, xytext=(4, -3), **_NAME)
    reference_line(axes, f"{100 * target:.4g} %", y=target)
    axes.set(xlabel="price of the fleet for an hour", ylabel="attainment")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    return figure
