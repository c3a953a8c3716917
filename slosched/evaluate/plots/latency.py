"""Figures of latencies: how long requests and tokens took, and their SLOs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from slosched.evaluate.plots.comparison import named
from slosched.evaluate.plots.fairness import promised
from slosched.evaluate.plots.style import (
    WIDTH_IN,
    legend_above,
    log_axis,
    look,
    reference_line,
    single_axes,
    tidy,
)
from slosched.metrics import RequestColumns, RequestRecord
from slosched.metrics.columns import FloatArray

_MAX_CURVE_POINTS = 400
_SHORTEST_S = 1e-6
"""Times are drawn on a logarithmic axis, which has no zero."""
_NO_ROOM = 0.8
"""The share of a panel's width beyond which a text is placed left of its line, to stay inside."""


def latency_cdfs(records: Mapping[str, Sequence[RequestRecord]]) -> Figure:
    """Draw TTFT and TPOT of each policy, as the share of *offered* requests within each time.

    A curve ends below 100 % where requests were rejected or never began.  The SLO is drawn if all
    requests have the same one.
    """
    names = named(records)
    figure = Figure(figsize=(WIDTH_IN, 3.6), layout="constrained")
    ttft_axes, tpot_axes = figure.subplots(1, 2, sharey=True)
    for i, name in enumerate(names):
        columns = RequestColumns.of(records[name])
        style = look(i).line(label=name, markevery=(0.03 + 0.02 * i, 0.18))
        total, is_single = len(columns.arrival_s), columns.num_output_tokens == 1
        _share_curve(ttft_axes, columns.ttft_s, 0, total, style)
        later = np.where(is_single, math.nan, columns.tpot_s)
        _share_curve(tpot_axes, later, int(is_single.sum()), total, style)
    slos = promised(records)
    _promise_line(ttft_axes, {slo.ttft_s for slo in slos})
    _promise_line(tpot_axes, {slo.tpot_s for slo in slos})
    ttft_axes.set(xlabel="TTFT (s)", ylabel="share of offered requests", ylim=(0, 1.02))
    tpot_axes.set(xlabel="TPOT (s)")
    ttft_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (ttft_axes, tpot_axes):
        log_axis(axes)
        tidy(axes)
    legend_above(figure)
    return figure


def gap_tails(records: Mapping[str, Sequence[RequestRecord]]) -> Figure:
    """Draw ITL of each policy: the share of all gaps between tokens that are as long or longer.

    Both axes are logarithmic, since readers of a stream notice the one gap in a hundred or
    thousand.
    """
    figure, axes = single_axes(height_in=3.6)
    smallest = 1.0
    for i, name in enumerate(named(records)):
        gap_s = RequestColumns.of(records[name]).gap_s
        ordered = np.maximum(np.sort(gap_s[~np.isnan(gap_s)]), _SHORTEST_S)
        style = look(i).line(label=name, markevery=(0.03 + 0.02 * i, 0.18))
        if not len(ordered):
            axes.plot([], [], **style)
            continue
        if len(ordered) == 1:  # a line without length has no place for such markers
            style["markevery"] = None
        # The tail gets as many points a decade as the bulk; no gap is longer than the longest one.
        above = np.unique(np.geomspace(1, len(ordered), _MAX_CURVE_POINTS).astype(int))[::-1]
        axes.step(ordered[len(ordered) - above], above / len(ordered), where="pre", **style)
        smallest = min(smallest, 1 / len(ordered))
    _promise_line(axes, {slo.tpot_s for slo in promised(records)})
    axes.set(xlabel="gap between tokens, ITL (s)", ylabel="share of gaps as long or longer")
    log_axis(axes)
    log_axis(axes, "y")
    axes.set_ylim(max(smallest, 1e-5) * 0.7, 1.4)
    axes.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
    legend_above(figure)
    return figure


def _share_curve(
    axes: Axes, values_s: FloatArray, num_below: int, total: int, style: Mapping[str, Any]
) -> None:
    """Draw the share of `total` at or below each value, plus `num_below` left of the axis."""
    ordered = np.maximum(np.sort(values_s[~np.isnan(values_s)]), _SHORTEST_S)
    if not len(ordered):
        axes.plot([], [], **style)
        return
    share = (num_below + np.arange(1, len(ordered) + 1)) / total
    keep = np.unique(np.linspace(0, len(ordered) - 1, _MAX_CURVE_POINTS - 1).astype(int))
    # The first value comes twice, so that the curve of a single request has a visible rise.
    values, shares = ordered[np.r_[0, keep]], np.r_[num_below / total, share[keep]]
    axes.step(values, shares, where="post", **style)


def _promise_line(axes: Axes, promises_s: set[float]) -> None:
    """Draw the SLO if there is only one.

    To be called after all else is drawn, and before the axes become logarithmic.
    """
    if len(promises_s) == 1 and math.isfinite(promise_s := promises_s.pop()):
        low_s, high_s = axes.dataLim.intervalx  # inf and -inf if there is nothing
        at_end = math.isfinite(high_s) and promise_s > low_s ** (1 - _NO_ROOM) * high_s**_NO_ROOM
        reference_line(axes, f"SLO {promise_s:g} s", x=promise_s, at_end=at_end)
