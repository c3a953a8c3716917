"""Figures of the arena's page.  The same results give the same bytes, on one matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.arena.contenders import Class
from experiments.arena.rows import Row, Tables, best, pick
from experiments.arena.targets import FLAGSHIP
from slosched.evaluate.plots.style import (
    BLACK,
    WIDTH_IN,
    legend_above,
    log_axis,
    look,
    reference_line,
    tidy,
)

OTHERS = [group.value for group in Class if group is not Class.OURS]
_PANELS_A_ROW = 4
_MOST_SHOWN = 12.0
"""The largest ratio drawn; a plain policy that breaks down would give any number."""

Curve = tuple[list[float], list[float]]


def figures(tables: Tables, order: Sequence[str]) -> Iterator[tuple[str, Figure]]:
    """Yield the name and the figure of each, as far as there are results."""
    for metric, name in (("capacity 99%", "capacity_99"), ("goodput 2x", "goodput_2x")):
        rows = pick(tables["ratios"], metric=metric, ours=FLAGSHIP)
        rows = [row for row in rows if not math.isnan(row["ratio"])]
        if rows:
            yield name, _ratios(rows, order, metric)
    overload, deciles = tables["overload"], tables["deciles"]
    if overload:
        label = "load, as a multiple of the best plain capacity at 90 %"
        yield "overload", _panels(order, label, lambda s, g: _over_loads(overload, s, g))
    if deciles:
        label = "tenth of the requests at twice the load, shortest prompts first"
        yield "deciles", _panels(order, label, lambda s, g: _over_deciles(tables, s, g))


def save(figure: Figure, path: Path) -> None:
    """Save as SVG without a date or a random id."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "slosched", "svg.fonttype": "none"}):
        figure.savefig(path, metadata={"Date": None})


def _ratios(rows: Sequence[Row], order: Sequence[str], metric: str) -> Figure:
    """Draw ours over the best of each class: a dot and a 95 % interval for each scenario."""
    names = [name for name in order if pick(rows, scenario=name)]
    figure = Figure(figsize=(WIDTH_IN, 1.4 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    tidy(axes)
    for i, group in enumerate(OTHERS):
        for row in pick(rows, class_=group):
            y = len(names) - 1 - names.index(row["scenario"]) + 0.22 * (1 - i)
            ends = [max(1 / _MOST_SHOWN, row["low"]), min(_MOST_SHOWN, row["high"])]
            looks, value = look(i + 1), min(row["ratio"], _MOST_SHOWN)
            label = f"over the best {group}"
            axes.plot(ends, [y, y], color=looks.colour, linewidth=1.4)
            axes.plot([value], [y], looks.marker, color=looks.colour, markersize=6, label=label)
    reference_line(axes, "", x=1.0)
    axes.set_yticks(range(len(names)), names[::-1])
    axes.set(xlabel=f"{metric} of {FLAGSHIP} over the others' (at most {_MOST_SHOWN:g} is shown)")
    log_axis(axes)  # before the limits are read: those of a linear axis may be below zero
    low, high = axes.get_xlim()
    axes.set_xlim(min(0.5, low), max(2.0, high))
    legend_above(figure)
    return figure


def _panels(
    order: Sequence[str], label: str, curve_of: Callable[[str, str], Curve | None]
) -> Figure:
    """Draw attainment: a panel for each scenario, curves for ours and the best of each class."""
    columns = min(_PANELS_A_ROW, len(order))
    num_rows = math.ceil(len(order) / columns)
    figure = Figure(figsize=(WIDTH_IN, 1.1 + 1.9 * num_rows), layout="constrained")
    grid = figure.subplots(num_rows, columns, squeeze=False, sharey=True)
    every = cast("list[Axes]", grid.ravel().tolist())
    for axes in every[len(order) :]:
        axes.set_visible(False)
    for axes, name in zip(every, order, strict=False):
        tidy(axes)
        for i, group in enumerate([Class.OURS.value, *OTHERS]):
            if (curve := curve_of(name, group)) is not None:
                ours = group == Class.OURS.value
                axes.plot(*curve, label=FLAGSHIP if ours else f"best {group}", **look(i).line())
        axes.set_title(name, fontsize=9)
        axes.set(ylim=(-0.02, 1.02))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    figure.supxlabel(label, fontsize=9, color=BLACK)
    figure.supylabel("attainment", fontsize=9, color=BLACK)
    legend_above(figure)
    return figure


def best_at(overload: Sequence[Row], scenario: str, load: float, group: str) -> Row | None:
    """Return the row of the best of a class at a load; for our class, that of the flagship."""
    rows = pick(overload, scenario=scenario, load=load, class_=group)
    if group == Class.OURS.value:
        rows = pick(rows, contender=FLAGSHIP)
    return best(rows, "attainment")


def _over_loads(overload: Sequence[Row], scenario: str, group: str) -> Curve | None:
    loads = sorted({row["load"] for row in overload})
    found = [best_at(overload, scenario, load, group) for load in loads]
    rows = [row for row in found if row is not None]
    return ([row["load"] for row in rows], [row["attainment"] for row in rows]) if rows else None


def _over_deciles(tables: Tables, scenario: str, group: str) -> Curve | None:
    who = best_at(tables["overload"], scenario, 2.0, group)
    if who is None:
        return None
    rows = pick(tables["deciles"], scenario=scenario, load=2.0, contender=who["contender"])
    return [row["decile"] for row in rows], [row["num_good"] / row["num_offered"] for row in rows]
