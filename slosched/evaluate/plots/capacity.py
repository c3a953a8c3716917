"""Figures of a capacity search: attainment and goodput of policies under rising load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from slosched.evaluate.plots.style import (
    BLACK,
    GREY,
    Look,
    legend_above,
    look,
    reference_line,
    single_axes,
)

ATTAINMENT = ("attainment", "attainment_low", "attainment_high")
GOODPUT = ("good_requests_per_s", "good_low", "good_high")
_BOUND_DASHES = ((0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)))


def goodput_curves(curve: pd.DataFrame) -> Figure:
    """Draw good requests/s against the offered rate, with 95 % bands.

    `curve` has a row for each policy and rate.  Its columns are policy, rate (offered requests/s),
    good_requests_per_s, good_low and good_high.  The columns bound_requests_per_s and bound_name
    are optional: no scheduler exceeds that bound at that rate.  The dotted line is the offered
    rate.
    """
    _check(curve, GOODPUT)
    figure, axes = single_axes(height_in=4.2)
    ends = [curve["rate"].min(), curve["rate"].max()]
    axes.plot(ends, ends, color=GREY, linestyle=":", linewidth=1.2, label="offered")
    _bounds(axes, curve)
    for name, rows, looks in _by_policy(curve):
        _banded(axes, rows, GOODPUT, name, looks)
    axes.set(xlabel="offered requests/s", ylabel="good requests/s")
    shown = [name for name in (*GOODPUT, "bound_requests_per_s") if name in curve.columns]
    axes.set_ylim(0, 1.08 * float(curve[shown].max().max()) or 1.0)
    legend_above(figure)
    return figure


def attainment_curves(curve: pd.DataFrame, targets: Sequence[float] = (0.9, 0.99)) -> Figure:
    """Draw SLO attainment against the offered rate, with 95 % bands and a line at each target.

    `curve` is as for `goodput_curves`, with attainment, attainment_low and attainment_high.  The
    rate at which a curve crosses a target is the policy's goodput at that target.
    """
    _check(curve, ATTAINMENT)
    figure, axes = single_axes(height_in=4.2)
    for name, rows, looks in _by_policy(curve):
        _banded(axes, rows, ATTAINMENT, name, looks)
    for target in targets:
        reference_line(axes, f"{target:.0%}", y=target)
    lowest = min([curve["attainment_low"].min(), curve["attainment"].min(), *targets])
    axes.set(xlabel="offered requests/s", ylabel="attainment")
    axes.set_ylim(max(0.0, lowest - 0.04) if lowest > 0.3 else -0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend_above(figure)
    return figure


def _check(curve: pd.DataFrame, columns: Sequence[str]) -> None:
    missing = [name for name in ("policy", "rate", *columns) if name not in curve.columns]
    if missing:
        raise ValueError(
            f"a curve needs the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}; "
            f"it has {', '.join(map(str, curve.columns)) or 'none'}"
        )
    if curve.empty:
        raise ValueError("a curve needs at least one point; this one has none")


def _by_policy(curve: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, Look]]:
    for i, (name, rows) in enumerate(curve.groupby("policy", sort=False)):
        yield str(name), rows.sort_values("rate"), look(i)


def _banded(
    axes: Axes, rows: pd.DataFrame, columns: tuple[str, str, str], name: str, looks: Look
) -> None:
    middle, low, high = columns
    axes.fill_between(
        rows["rate"], rows[low], rows[high], color=looks.colour, alpha=0.18, linewidth=0
    )
    # The edges are drawn as well: in grey, bands that overlap could not be distinguished.
    for limit in (low, high):
        axes.plot(rows["rate"], rows[limit], color=looks.colour, linewidth=0.5, alpha=0.7)
    axes.plot(rows["rate"], rows[middle], label=name, **looks.line())


def _bounds(axes: Axes, curve: pd.DataFrame) -> None:
    """Draw the bounds on any scheduler, which at one rate are the same for all policies."""
    if "bound_requests_per_s" not in curve.columns:
        return
    known = curve.dropna(subset=["bound_requests_per_s"])
    names = known["bound_name"] if "bound_name" in curve.columns else ["bound"] * len(known)
    groups = known.assign(bound_name=list(names)).groupby("bound_name", sort=False)
    for (name, rows), dash in zip(groups, cycle(_BOUND_DASHES), strict=False):
        line = rows.groupby("rate")["bound_requests_per_s"].min().sort_index()
        axes.plot(
            line.index, line, color=BLACK, linestyle=dash, linewidth=1.3, label=f"bound: {name}"
        )
