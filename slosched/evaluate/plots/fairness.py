"""Figures of fairness: attainment by prompt length and by SLO."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from slosched.core import SLO, DeadlineRule
from slosched.evaluate.plots.comparison import named
from slosched.evaluate.plots.style import legend_above, log_axis, look, single_axes
from slosched.metrics import RequestRecord, attainment_by_decile, attainment_by_tier

MAX_TIERS = 12
"""The greatest number of different SLOs for which a figure by SLO is drawn.

A TTFT that grows with the prompt length, for example, gives nearly every request its own SLO.
"""
_HATCHES = ("", "///", "...", "xxx", "\\\\\\", "+++", "ooo")


def decile_lines(records: Mapping[str, Sequence[RequestRecord]], rule: DeadlineRule) -> Figure:
    """Draw attainment by prompt length, which shows whether a policy neglects long prompts."""
    figure, axes = single_axes(height_in=3.4)
    for i, name in enumerate(named(records)):
        rows = attainment_by_decile(records[name], rule)
        middles = [math.sqrt(r.min_prompt_tokens * r.max_prompt_tokens) for r in rows]
        axes.plot(middles, [row.attainment for row in rows], label=name, **look(i).line())
    axes.set(xlabel="prompt tokens (middle of each tenth of the requests)", ylabel="attainment")
    axes.set(ylim=(-0.02, 1.02))
    log_axis(axes)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend_above(figure)
    return figure


def tier_bars(records: Mapping[str, Sequence[RequestRecord]], rule: DeadlineRule) -> Figure:
    """Draw attainment by SLO: one group of bars for each SLO, one bar for each policy."""
    names = named(records)
    tiers = {name: attainment_by_tier(records[name], rule) for name in names}
    slos = list(dict.fromkeys(row.slo for rows in tiers.values() for row in rows))
    figure, axes = single_axes(height_in=3.4)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        share = {row.slo: row.attainment for row in tiers[name]}
        style: dict[str, Any] = {
            "color": look(i).colour,
            "hatch": _HATCHES[i % len(_HATCHES)],
            "edgecolor": "white",
            "linewidth": 0.6,
        }
        at = np.arange(len(slos)) + (i - (len(names) - 1) / 2) * width
        axes.bar(at, [share.get(slo, math.nan) for slo in slos], width, label=name, **style)
    offered = {row.slo: row.num_offered for name in reversed(names) for row in tiers[name]}
    counts = [offered[slo] for slo in slos]
    labels = [f"{promise(slo)}\n{n} requests" for slo, n in zip(slos, counts, strict=True)]
    axes.set_xticks(range(len(slos)), labels, fontsize=8)
    axes.set(ylabel="attainment", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.grid(visible=False, axis="x")
    legend_above(figure)
    return figure


def promised(records: Mapping[str, Sequence[RequestRecord]]) -> set[SLO]:
    """Return the different SLOs of the requests."""
    return {record.slo for replay in records.values() for record in replay}


def promise(slo: SLO) -> str:
    """Write an SLO as it stands on an axis: `1 s, 50 ms/token`."""
    parts = [f"{_seconds(slo.ttft_s)}, {_seconds(slo.tpot_s)}/token"]
    if slo.e2e_s is not None:
        parts.append(f"{_seconds(slo.e2e_s)} in all")
    return ", ".join(parts)


def _seconds(seconds: float) -> str:
    if math.isinf(seconds):
        return "any time"
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"
