"""Figures of a comparison and of a fitted latency model; `timeline` draws a single replay.

Every function returns a new `matplotlib.figure.Figure`; pyplot and its global state are not
touched, so no display is needed and nothing has to be closed.  The colours are Okabe and Ito's,
which the colour-blind can tell apart; hatches, line styles and labels say the same without colour.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from slosched.core import DeadlineRule
from slosched.evaluate.metrics import RequestRecord, Summary, attainment_by_decile

BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, GREY, BLACK = "#56B4E9", "#CC79A7", "#8A8A8A", "#000000"
_COLOURS = (BLUE, VERMILION, GREEN, PURPLE, BLACK, ORANGE, SKY)
_DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)))
"""One fewer than colours, so that the pairs repeat only after 42 policies."""
_MARKERS = "osD^vPX"
_MAX_CURVE_POINTS = 400
_MAX_VECTOR_DOTS = 1500
"""More dots than this are drawn as one image inside an SVG, which would be megabytes otherwise."""
WIDTH_IN = 8.0


def outcome_bars(summaries: Mapping[str, Summary]) -> Figure:
    """What became of the offered requests under each policy: SLO attainment and the rest of it."""
    names = _named(summaries)
    figure, axes = _figure(height_in=0.9 + 0.42 * len(names))
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
        axes.barh(names, share, left=left, height=0.68, label=label, **style)
        left += share
    for row, summary in enumerate(summaries.values()):
        axes.text(1.01, row, f"{summary.attainment:.1%} good", va="center", fontsize=9)
    axes.set(xlim=(0, 1), xlabel="share of offered requests")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.invert_yaxis()
    axes.grid(visible=False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return figure


def goodput_bars(summaries: Mapping[str, Summary]) -> Figure:
    """Good requests/s of each policy, beside the rate that was offered to it."""
    names = _named(summaries)
    figure, axes = _figure(height_in=0.9 + 0.42 * len(names))
    goodputs = [s.good_requests_per_s for s in summaries.values()]
    offered = [s.offered_requests_per_s for s in summaries.values()]
    best = max((g for g in goodputs if not math.isnan(g)), default=0.0)
    colours = [BLUE if goodput == best else SKY for goodput in goodputs]
    axes.barh(names, goodputs, height=0.68, color=colours)
    positions = np.arange(len(names))
    axes.vlines(offered, positions - 0.42, positions + 0.42, colors=BLACK, linestyles="--")
    for row, goodput in enumerate(goodputs):
        if not math.isnan(goodput):
            axes.text(goodput, row, f" {goodput:.2f}", va="center", fontsize=9)
    axes.plot([], [], color=BLACK, linestyle="--", label="offered")
    axes.set(xlabel="good requests/s")
    axes.margins(x=0.1)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.grid(visible=False)
    figure.legend(loc="outside upper center", frameon=False, fontsize=9)
    return figure


def latency_cdfs(records: Mapping[str, Sequence[RequestRecord]]) -> Figure:
    """TTFT and TPOT of each policy as the share of *offered* requests that had them in that time.

    A curve ends below 100 % where requests were rejected or never began.  The SLO is drawn where
    all requests share one.
    """
    _named(records)
    figure = Figure(figsize=(WIDTH_IN, 3.4), layout="constrained")
    ttft_axes, tpot_axes = figure.subplots(1, 2, sharey=True)
    for (name, replay), colour, line in zip(
        records.items(), cycle(_COLOURS), cycle(_DASHES), strict=False
    ):
        ttfts = [r.ttft_s for r in replay if r.ttft_s is not None]
        tpots = [r.tpot_s for r in replay if r.tpot_s is not None and r.num_output_tokens > 1]
        singles = sum(r.num_output_tokens == 1 for r in replay)
        style: dict[str, Any] = {
            "color": colour,
            "linestyle": line,
            "linewidth": 1.7,
            "label": name,
        }
        _share_curve(ttft_axes, ttfts, 0, len(replay), style)
        _share_curve(tpot_axes, tpots, singles, len(replay), {**style, "label": None})
    slos = {record.slo for replay in records.values() for record in replay}
    _promise_line(ttft_axes, {slo.ttft_s for slo in slos})
    _promise_line(tpot_axes, {slo.tpot_s for slo in slos})
    ttft_axes.set(xlabel="TTFT (s)", ylabel="share of offered requests", ylim=(0, 1.02))
    tpot_axes.set(xlabel="TPOT (s)")
    ttft_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (ttft_axes, tpot_axes):
        _log_axis(axes)
        tidy(axes)
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure


def decile_lines(records: Mapping[str, Sequence[RequestRecord]], rule: DeadlineRule) -> Figure:
    """Attainment by prompt length: which requests pay for a policy's total."""
    _named(records)
    figure, axes = _figure(height_in=3.2)
    for (name, replay), colour, line, marker in zip(
        records.items(), cycle(_COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False
    ):
        rows = attainment_by_decile(replay, rule)
        middles = [math.sqrt(r.min_prompt_tokens * r.max_prompt_tokens) for r in rows]
        shares = [row.attainment for row in rows]
        look: dict[str, Any] = {
            "color": colour,
            "linestyle": line,
            "marker": marker,
            "markersize": 5,
        }
        axes.plot(middles, shares, label=name, **look)
    axes.set(xlabel="prompt tokens (middle of each tenth of the requests)", ylabel="attainment")
    axes.set(ylim=(-0.02, 1.02))
    _log_axis(axes)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=9)
    return figure


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
    _log_axis(times)
    _log_axis(times, "y")
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


def _figure(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, height_in), layout="constrained")
    axes = figure.subplots()
    tidy(axes)
    return figure, axes


def tidy(axes: Axes) -> None:
    """The look of all our axes: no box, a faint grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(visible=True, color="#E6E6E6", linewidth=0.7)
    axes.set_axisbelow(True)


def _log_axis(axes: Axes, which: Literal["x", "y"] = "x") -> None:
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


def _named(by_policy: Mapping[str, object]) -> list[str]:
    if not by_policy:
        raise ValueError("there is no policy to draw")
    return list(by_policy)


def _share_curve(
    axes: Axes, values_s: Sequence[float], num_below: int, total: int, style: Mapping[str, Any]
) -> None:
    """The share of `total` at or below each value; `num_below` more lie left of the axis."""
    if not values_s:
        axes.plot([], [], **style)
        return
    ordered = np.maximum(np.sort(values_s), 1e-6)
    share = (num_below + np.arange(1, len(ordered) + 1)) / total
    keep = np.unique(np.linspace(0, len(ordered) - 1, _MAX_CURVE_POINTS).astype(int))
    axes.step(ordered[keep], share[keep], where="post", **style)


def _promise_line(axes: Axes, promises_s: set[float]) -> None:
    if len(promises_s) == 1 and math.isfinite(promise_s := promises_s.pop()):
        axes.axvline(promise_s, color=BLACK, linewidth=1, linestyle=(0, (2, 2)))
        axes.annotate(
            f"SLO {promise_s:g} s",
            xy=(promise_s, 0.03),
            xytext=(3, 0),
            textcoords="offset points",
            fontsize=8,
        )
