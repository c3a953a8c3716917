"""`python -m experiments.goodput`: play every idea at every point, and make the page."""

from __future__ import annotations

import time
from itertools import product
from typing import Annotated

import pandas as pd
import typer

from experiments.command import make_app, start
from experiments.goodput import report, results
from experiments.goodput.ideas import IDEAS
from experiments.goodput.points import NUM_WINDOWS, POINTS
from slosched.cli.console import console, progress_bar

app = make_app(__doc__)


@app.command()
def run(
    only: Annotated[
        str | None,
        typer.Option(
            metavar="POINT,…", help="Play these points anew, and whatever is missing at the others."
        ),
    ] = None,
) -> None:
    """Play every idea at every point (about an hour on one core), and make the page.

    Example: `python -m experiments.goodput run --only "conv medium 44/s"`.
    """
    begin_s = time.monotonic()
    kept = results.of_points(_all_but(only))
    known = set(zip(kept["point"], kept["idea"], kept["window"], strict=True))
    cases = [
        (point, idea, window)
        for point, idea, window in product(POINTS, IDEAS, range(NUM_WINDOWS))
        if (point.name, idea.name, window) not in known
    ]
    with progress_bar() as progress:
        rows = [
            results.play(idea, point, window)
            for point, idea, window in progress.track(cases, description="replaying")
        ]
    results.put(kept, pd.DataFrame(rows), (time.monotonic() - begin_s) / 60)
    _report()


@app.command("report")
def make_report() -> None:
    """Make README.md from the committed results, introduction.md and findings.md.

    Example: `python -m experiments.goodput report`.
    """
    _report()


def _all_but(text: str | None) -> list[str]:
    """Return the points whose results are kept; raise ValueError if `text` names an unknown one."""
    if text is None:
        return []
    points, named = [point.name for point in POINTS], [name.strip() for name in text.split(",")]
    if unknown := [name for name in named if name not in points]:
        raise ValueError(f"no point {'; '.join(unknown)}; there are {'; '.join(points)}")
    return [name for name in points if name not in named]


def _report() -> None:
    report.PAGE.write_text(report.text(), encoding="utf-8")
    console.print(f"wrote {report.PAGE}")


if __name__ == "__main__":
    start(app)
