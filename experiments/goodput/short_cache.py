"""`python -m experiments.goodput.short_cache`: goodput where KV blocks are scarcer than time.

An H100 with an 8B model serves conversations with a half, a quarter and an eighth of its KV cache.
Prints the table of docs/policies/goodput.md: the mean attainment of the windows in percent, and how
much more `goodput` has, with a 95 % interval.  No part of goodput was designed on these windows.
"""

from __future__ import annotations

import numpy as np
import typer

from experiments.arena.scenarios import SCENARIOS
from experiments.goodput.points import Point
from experiments.markdown import table
from experiments.paired import FloatArray, against
from slosched.policy.spec import make_policy

NUM_WINDOWS = 10
OTHERS = ("sjf:drop=infeasible", "edf:drop=infeasible", "qoserve")
LOADS = ((2, 22.0), (2, 26.0), (4, 16.0), (4, 20.0), (4, 24.0), (8, 10.0), (8, 14.0))
"""Divisors of the cache, each with requests per second."""
POINTS = tuple(
    Point(f"÷ {divisor}, {rate:g}/s", SCENARIOS["conv-medium"], rate, 800, 12, cache_factor=divisor)
    for divisor, rate in LOADS
)


def main() -> None:
    """Play all policies at all points, and print a table of their figures."""
    heads = ["KV cache, load", "`goodput`", *(f"more than `{spec}`" for spec in OTHERS)]
    rows = []
    for point in POINTS:
        ours = _attainments(point, "goodput")
        others = [against(ours - _attainments(point, spec)) for spec in OTHERS]
        rows.append([point.name, f"{ours.mean():.1f}", *others])
    typer.echo(table(heads, rows, num_texts=1))


def _attainments(point: Point, spec: str) -> FloatArray:
    """Return the attainment of each window in percent."""
    played = [point.play(make_policy(spec), window) for window in range(NUM_WINDOWS)]
    return np.array([100 * shares["attainment"] for shares in played])


if __name__ == "__main__":
    main()
