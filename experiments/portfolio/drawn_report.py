"""What the page says of the cells of the random arena."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import pandas as pd

from experiments.markdown import table
from experiments.portfolio.drawn import LOADS, PORTFOLIO, WINDOW_REQUESTS

RESULTS = Path(__file__).with_name("drawn.csv")
LEAST_RATIO = 0.98
"""The ratio to the best candidate that no cell should be below."""
_CELL = ["seed", "cell", "load"]


def read() -> pd.DataFrame:
    """Return the results; none if no cell has been played."""
    return pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=_CELL)


def replace_cell(rows: pd.DataFrame) -> None:
    """Write the results of one cell, in place of those that it had."""
    kept = read()
    if len(kept):
        same = (kept["seed"] == rows["seed"].iloc[0]) & (kept["cell"] == rows["cell"].iloc[0])
        rows = pd.concat([kept[~same], rows])
    rows.sort_values(["seed", "cell", "load"], kind="stable").to_csv(RESULTS, index=False)


def text() -> str:
    """Return the section in Markdown."""
    results = read()
    parts = ["## Cells drawn at random", _ABOUT]
    for seed, of_seed in results.groupby("seed"):
        ratios = [_ratio(played) for _, played in of_seed.groupby(_CELL)]
        parts += [f"### Seed {seed}", _summary(ratios), _table(ratios)]
    return "\n\n".join(parts)


_ABOUT = f"""Made by `python -m experiments.portfolio drawn --seed 3 --cells 60`, as far as it was \
run. The cells are those of [the random arena](../../docs/random_arena.md). In each a window of \
{WINDOW_REQUESTS} requests (fewer where they are long) is played under each candidate and under \
`portfolio`, at {LOADS[0]:g} and {LOADS[1]:g} times the rate at which policies are tuned there. \
All requests count that an idle device could serve in time, from the first on, when nothing has \
been learnt yet. "Best" is the candidate with the most good requests in that window and at that \
load, chosen in hindsight. "Cost" is the processor time of a simulation with `portfolio` over that \
of one with `goodput` alone. Cells of seeds 1 and 2 were looked at while `portfolio` was changed."""


class _Ratio(NamedTuple):
    """How a portfolio compares with its candidates in one cell at one load."""

    cell: int
    what: str
    load: float
    best: str
    good: int
    good_of_best: int
    good_of_first: int
    num_judged: int
    num_changes: int
    cpu_s: float
    cpu_s_of_first: float

    @property
    def ratio(self) -> float:
        """Return the good requests over those of the best candidate."""
        return self.good / max(1, self.good_of_best)


def _ratio(played: pd.DataFrame) -> _Ratio:
    """Return the comparison of one cell at one load."""
    rows = {str(row["policy"]): row for row in played.to_dict("records")}
    ours = rows.pop(PORTFOLIO)
    first = next(iter(rows.values()))
    best = max(rows.values(), key=lambda row: int(row["num_good"]))
    return _Ratio(
        int(ours["cell"]),
        str(ours["what"]),
        float(ours["load"]),
        str(best["policy"]),
        int(ours["num_good"]),
        int(best["num_good"]),
        int(first["num_good"]),
        int(ours["num_judged"]),
        int(ours["num_changes"]),
        float(ours["cpu_s"]),
        float(first["cpu_s"]),
    )


def _summary(ratios: Sequence[_Ratio]) -> str:
    worst = min(ratios, key=lambda one: one.ratio)
    num_below = sum(one.ratio < LEAST_RATIO for one in ratios)
    mean = geometric_mean(max(0.01, one.ratio) for one in ratios)
    cost = sum(one.cpu_s for one in ratios) / sum(one.cpu_s_of_first for one in ratios)
    num_cells = len({one.cell for one in ratios})
    return (
        f"{num_cells} cells at {len(LOADS)} loads. Good requests over those of the best candidate: "
        f"geometric mean {mean:.3f}, worst {worst.ratio:.3f} (cell "
        f"{worst.cell}, load {worst.load:g}), below {LEAST_RATIO:g} in {num_below} of "
        f"{len(ratios)}. Cost over all of them: {cost:.1f}."
    )


def _table(ratios: Sequence[_Ratio]) -> str:
    rows = [
        [
            f"{one.cell}: {one.what}",
            f"{one.load:g}",
            f"`{one.best}`",
            *(
                f"{100 * good / one.num_judged:.1f}"
                for good in (one.good_of_best, one.good_of_first)
            ),
            f"**{100 * one.good / one.num_judged:.1f}**",
            f"{one.ratio:.3f}",
            one.num_changes,
            f"{one.cpu_s / max(0.01, one.cpu_s_of_first):.1f}",
        ]
        for one in ratios
    ]
    heads = ["cell", "load", "best", "its share, %", "`goodput`", "`portfolio`", "ratio"]
    return table([*heads, "changes", "cost"], rows, 1)
