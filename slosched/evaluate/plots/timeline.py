"""The figure of one replay: what the device did, second by second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from slosched.core import DeadlineRule
from slosched.evaluate.plots.style import (
    BLACK,
    BLUE,
    GREY,
    ORANGE,
    SKY,
    VERMILION,
    WIDTH_IN,
    tidy,
)
from slosched.metrics import RequestRecord, StepRow, least_slack_s
from slosched.metrics.columns import FloatArray

_MAX_BINS = 400
_LINEAR_S = 0.1
"""Slack up to which its axis is linear."""
_AREA: dict[str, Any] = {"step": "post", "linewidth": 0.0}


def timeline(
    steps: Sequence[StepRow],
    records: Sequence[RequestRecord] = (),
    rule: DeadlineRule = DeadlineRule.MEAN_TPOT,
    changes: Sequence[tuple[float, str]] = (),
) -> Figure:
    """Draw one replay over time: tokens in the batches, requests by state, KV cache used.

    Long replays are averaged over at most `_MAX_BINS` intervals: tokens over the steps in each, the
    rest over its time.  With `records` of its requests, the slack of the most urgent request is
    drawn as well (the least in each interval).  `changes` are times at which another policy took
    over, with its name.  Raises ValueError if there are no steps.
    """
    if not steps:
        raise ValueError("there are no steps to draw: the replay executed nothing")
    edges = np.linspace(
        steps[0].start_s,
        steps[-1].start_s + steps[-1].duration_s,
        min(len(steps), _MAX_BINS) + 1,
    )
    num_panels = 4 if records else 3
    figure = Figure(figsize=(WIDTH_IN, 1.75 * num_panels), layout="constrained")
    panels = figure.subplots(num_panels, 1, sharex=True)
    _batches(panels[0], steps, edges)
    _queues(panels[1], steps, edges)
    _memory(panels[2], steps, edges)
    if records:
        _slack(panels[3], least_slack_s(records, rule, edges), edges)
    for axes in panels:
        for at_s, _ in changes:
            axes.axvline(at_s, color=GREY, linewidth=1, linestyle="--")
        tidy(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    for at_s, name in changes:
        place = {"xy": (at_s, 1.0), "xycoords": ("data", "axes fraction")}
        panels[0].annotate(name, **place, fontsize=7, rotation=20, va="bottom")
    panels[-1].set(xlabel="time (s)")
    if edges[0] < edges[-1]:
        panels[-1].set(xlim=(edges[0], edges[-1]))
    figure.align_ylabels(panels)
    return figure


def _batches(axes: Axes, steps: Sequence[StepRow], edges: FloatArray) -> None:
    """Draw tokens a step on a logarithmic axis: dozens of decodes next to a thousand of prefill."""
    prefill = _mean_over_bins(steps, [s.num_prefill_tokens for s in steps], edges, busy_only=True)
    decode = _mean_over_bins(steps, [s.num_decodes for s in steps], edges, busy_only=True)
    axes.fill_between(edges, 0, _held(prefill), color=ORANGE, label="prefill", **_AREA)
    axes.step(edges, _held(decode), where="post", color=BLUE, linewidth=1.3, label="decode")
    # Limits come first: without them a logarithmic axis warns where nothing was computed.
    axes.set(ylabel="tokens a step", ylim=(0.8, 1.6 * max(prefill.max(), decode.max(), 1)))
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")


def _queues(axes: Axes, steps: Sequence[StepRow], edges: FloatArray) -> None:
    queues = (
        ("running", [s.num_running for s in steps], BLUE, "-"),
        ("waiting", [s.num_waiting for s in steps], VERMILION, "--"),
        ("swapped", [s.num_swapped for s in steps], BLACK, ":"),
    )
    for label, counts, colour, line in queues:
        if any(counts) or label != "swapped":
            mean = _mean_over_bins(steps, counts, edges)
            axes.step(edges, _held(mean), where="post", color=colour, ls=line, label=label)
    axes.set(ylabel="requests", ylim=(0, None))


def _memory(axes: Axes, steps: Sequence[StepRow], edges: FloatArray) -> None:
    used = _mean_over_bins(steps, [s.kv_used_fraction for s in steps], edges)
    axes.fill_between(edges, 0, _held(used), color=SKY, label="KV cache used", **_AREA)
    rejections = [s.start_s for s in steps if s.num_rejected]
    if rejections:
        level = np.full(len(rejections), 1.04)
        axes.plot(rejections, level, "|", color=VERMILION, ms=7, label="rejections")
    axes.set(ylabel="KV cache", ylim=(0, 1.1))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))


def _slack(axes: Axes, slack_s: FloatArray, edges: FloatArray) -> None:
    """Draw slack on an axis that is linear up to `_LINEAR_S` and logarithmic beyond.

    So gaps between tokens and waits in the queue fit into one picture.
    """
    slack = _held(np.where(np.isinf(slack_s), math.nan, slack_s))
    label = "slack of the\nmost urgent"
    axes.step(edges, slack, where="post", color=BLACK, linewidth=1, label=label)
    late: dict[str, Any] = {"facecolor": ORANGE, "edgecolor": VERMILION, "hatch": "/////"}
    axes.fill_between(edges, 0, np.minimum(slack, 0), label="late", **late, **_AREA)
    axes.axhline(0, color=GREY, linewidth=0.8)
    if np.nanmax(np.abs(slack), initial=0.0) > _LINEAR_S:  # or else there were ticks at 0 alone
        axes.set_yscale("symlog", linthresh=_LINEAR_S)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set(ylabel="slack (s)")


def _mean_over_bins(
    steps: Sequence[StepRow], values: Sequence[float], edges: FloatArray, busy_only: bool = False
) -> FloatArray:
    """Return the time average of a step's value in each bin, shape (len(edges) - 1,).

    Idle time counts as 0, or with `busy_only` not at all.
    """
    starts = np.array([s.start_s for s in steps])
    durations = np.array([s.duration_s for s in steps])
    # The integral over time is linear within a step and flat between steps.
    knots = np.column_stack([starts, starts + durations]).ravel()
    integral = _integral_in_bins(knots, durations * np.asarray(values, dtype=np.float64), edges)
    time_s = _integral_in_bins(knots, durations, edges) if busy_only else np.diff(edges)
    return np.divide(integral, time_s, out=np.zeros_like(integral), where=time_s > 0)


def _integral_in_bins(knots: FloatArray, amounts: FloatArray, edges: FloatArray) -> FloatArray:
    after = np.cumsum(amounts)
    cumulative = np.column_stack([after - amounts, after]).ravel()
    return np.diff(np.interp(edges, knots, cumulative))


def _held(values: FloatArray) -> FloatArray:
    """Repeat the last value, for the edge that ends the last bin."""
    return np.append(values, values[-1:])
