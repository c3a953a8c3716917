"""`python -m experiments.goodput.ageing`: what ageing gives to the longest tenth.

An H100 with an 8B model gets twice the load that it can keep.  Prints the table of
docs/policies/goodput.md: each row is a setting of `goodput`, each figure the mean of the windows.
"""

from __future__ import annotations

import typer

from experiments.arena.scenarios import SCENARIOS
from experiments.goodput.points import Point
from experiments.markdown import table
from slosched.policy.goodput.policy import Goodput

NUM_WINDOWS = 4
POINTS = (
    Point("conversations, 44/s", SCENARIOS["conv-medium"], 44, 800, 12),
    Point("conversations, 60/s", SCENARIOS["conv-medium"], 60, 800, 12),
    Point("code, 8/s", SCENARIOS["code-medium"], 8, 400, 8),
    Point("code, 12/s", SCENARIOS["code-medium"], 12, 400, 8),
)
SETTINGS: tuple[tuple[str, float], ...] = (
    *(("ageing", share) for share in (0.0, 0.25, 0.5, 0.75, 1.0)),
    *(("fairness", share) for share in (0.25, 0.5, 0.75, 1.0)),
)


def main() -> None:
    """Play all settings at all points, and print a table of their figures."""
    rows = [[f"`{name}={value:g}`", *_figures(name, value)] for name, value in SETTINGS]
    heads = [f"{point.name}: {what}" for point in POINTS for what in ("good/s", "longest tenth")]
    typer.echo(table(["setting", *heads], rows, num_texts=1))


def _figures(name: str, value: float) -> list[str]:
    """Return good requests/s and the attainment of the longest tenth, point by point."""
    figures = []
    for point in POINTS:
        played = [point.play(Goodput(**{name: value}), w) for w in range(NUM_WINDOWS)]
        attainment, longest = (
            sum(shares[key] for shares in played) / NUM_WINDOWS
            for key in ("attainment", "longest_tenth")
        )
        figures += [f"{point.requests_per_s * attainment:.2f}", f"{100 * longest:.0f} %"]
    return figures


if __name__ == "__main__":
    main()
