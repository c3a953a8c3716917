"""The figure of one replay: what the device did, second by second."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from slosched.evaluate.metrics import StepRow
from slosched.evaluate.plots.style import BLUE, GREEN, ORANGE, SKY, VERMILION, WIDTH_IN, tidy

FloatArray = npt.NDArray[np.float64]

_MAX_BINS = 400


def timeline(steps: Sequence[StepRow]) -> Figure:
    """One replay over time: what the batches held, who ran and waited, how full the KV cache was.

    Long replays are averaged over at most `_MAX_BINS` intervals; tokens over the steps
    in each, the rest over its time.
    """
    if not steps:
        raise ValueError("there are no steps to draw: the replay executed nothing")
    edges = np.linspace(
        steps[0].start_s,
        steps[-1].start_s + steps[-1].duration_s,
        min(len(steps), _MAX_BINS) + 1,
    )
    figure = Figure(figsize=(WIDTH_IN, 5.6), layout="constrained")
    batch_axes, queue_axes, kv_axes = figure.subplots(3, 1, sharex=True)

    prefill = _mean_over_bins(steps, [s.num_prefill_tokens for s in steps], edges, busy_only=True)
    decode = _mean_over_bins(steps, [s.num_decodes for s in steps], edges, busy_only=True)
    area: dict[str, Any] = {"step": "post", "linewidth": 0.0}
    batch_axes.fill_between(edges, 0, _held(decode), color=BLUE, label="decode", **area)
    tops = (_held(decode), _held(decode + prefill))
    batch_axes.fill_between(edges, *tops, color=ORANGE, label="prefill", **area)
    batch_axes.set(ylabel="tokens a step", ylim=(0, None))

    queues = (
        ("running", [s.num_running for s in steps], BLUE, "-"),
        ("waiting", [s.num_waiting for s in steps], VERMILION, "--"),
        ("swapped", [s.num_swapped for s in steps], GREEN, ":"),
    )
    for label, counts, colour, line in queues:
        if any(counts) or label != "swapped":
            mean = _mean_over_bins(steps, counts, edges)
            queue_axes.step(edges, _held(mean), where="post", color=colour, ls=line, label=label)
    queue_axes.set(ylabel="requests", ylim=(0, None))

    used = _mean_over_bins(steps, [s.kv_used_fraction for s in steps], edges)
    kv_axes.fill_between(edges, 0, _held(used), color=SKY, label="KV cache used", **area)
    rejections = [s.start_s for s in steps if s.num_rejected]
    if rejections:
        level = np.full(len(rejections), 1.04)
        kv_axes.plot(rejections, level, "|", color=VERMILION, ms=7, label="rejections")
    kv_axes.set(ylabel="KV cache", ylim=(0, 1.1), xlabel="time (s)")
    kv_axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (batch_axes, queue_axes, kv_axes):
        tidy(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)
    kv_axes.set_xlim(edges[0], edges[-1])
    return figure


def _mean_over_bins(
    steps: Sequence[StepRow], values: Sequence[float], edges: FloatArray, busy_only: bool = False
) -> FloatArray:
    """Time average of a step's value in each bin, shape (len(edges) - 1,).

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
    """The last value once more, for the edge that ends the last bin."""
    return np.append(values, values[-1:])
