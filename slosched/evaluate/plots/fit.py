"""The figure of a fitted latency model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from slosched.evaluate.plots.style import BLACK, BLUE, GREY, VERMILION, WIDTH_IN, log_axis, tidy

_MAX_VECTOR_DOTS = 1500
"""More dots than this are drawn as one image inside an SVG, which would be megabytes otherwise."""


def fit_plot(
    predicted_s: npt.ArrayLike,
    measured_s: npt.ArrayLike,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> Figure:
    """Predicted against measured step times, and the relative errors; both of shape (n,).

    `groups` names sets of steps by their indices, such as the regimes.  The errors of each are a
    box of the quartiles, whiskers from the 5th to the 95th percentile, and the steps outside those.
    """
    predicted, measured = (np.asarray(v, dtype=np.float64) for v in (predicted_s, measured_s))
    if predicted.shape != measured.shape or predicted.ndim != 1 or not predicted.size:
        raise ValueError(
            "fit_plot needs two arrays of one and the same length, at least 1, "
            f"not shapes {predicted.shape} and {measured.shape}"
        )
    if (measured <= 0).any() or not (np.isfinite(measured) & np.isfinite(predicted)).all():
        raise ValueError("fit_plot needs finite times, and measured ones above 0")
    error = predicted / measured - 1
    named = {"all": range(len(error)), **(groups or {})}
    figure = Figure(figsize=(WIDTH_IN, max(3.5, 1.2 + 0.45 * len(named))), layout="constrained")
    times, errors = figure.subplots(1, 2)
    times.scatter(
        measured * 1e3,
        predicted * 1e3,
        color=BLUE,
        s=11,
        alpha=0.55,
        linewidths=0,
        rasterized=len(error) > _MAX_VECTOR_DOTS,
    )
    ends = np.array([measured.min(), measured.max()]) * 1e3
    times.plot(ends, ends, color=BLACK, linewidth=1, label="exact")
    times.plot(ends, ends * 1.1, color=GREY, linewidth=1, linestyle="--", label="±10 %")
    times.plot(ends, ends * 0.9, color=GREY, linewidth=1, linestyle="--")
    times.set(xlabel="measured (ms)", ylabel="predicted (ms)")
    log_axis(times)
    log_axis(times, "y")
    times.legend(frameon=False, fontsize=9, loc="upper left")
    _error_boxes(errors, {name: error[list(members)] for name, members in named.items()})
    errors.set_title(f"mean |error| {np.abs(error).mean():.2%}, n = {len(error)}", fontsize=10)
    for axes in (times, errors):
        tidy(axes)
    return figure


def _error_boxes(axes: Axes, groups: Mapping[str, npt.NDArray[np.float64]]) -> None:
    """One box a group, the first on top; left of zero a step took longer than was promised."""
    axes.boxplot(
        list(groups.values()),
        orientation="horizontal",
        whis=(5, 95),
        widths=0.55,
        medianprops={"color": VERMILION, "linewidth": 1.5},
        flierprops={"marker": ".", "markersize": 3, "markeredgecolor": GREY},
    )
    labels = [f"{name} ({len(values)})" for name, values in groups.items()]
    axes.set_yticks(range(1, len(labels) + 1), labels)
    axes.invert_yaxis()
    axes.axvline(0, color=BLACK, linewidth=1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel(
        "predicted / measured − 1\n(left of 0, steps take longer than predicted)", fontsize=9
    )
