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
"""Above this number the dots are drawn as one image inside an SVG, which else takes megabytes."""


def fit_plot(
    predicted_s: npt.ArrayLike,
    measured_s: npt.ArrayLike,
    groups: Mapping[str, Sequence[int]] | None = None,
) -> Figure:
    """Draw predicted against measured step times, both of shape (n,), and the relative errors.

    `groups` names sets of steps, such as the regimes, by their indices.  Each group's errors are a
    box of the quartiles, whiskers from the 5th to the 95th percentile, and dots for the steps
    outside.  Raises ValueError for arrays of other shapes or times that are not finite.
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
    """Draw one box for each group, the first on top; left of 0 steps took longer than predicted."""
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
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(
        "predicted / measured − 1\n(left of 0, steps take longer than predicted)", fontsize=9
    )
