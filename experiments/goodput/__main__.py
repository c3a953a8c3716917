"""`python -m experiments.goodput`: try every idea at every point, and make the page."""

from __future__ import annotations

import time
from itertools import product

import pandas as pd
import typer

from experiments.command import start
from experiments.goodput import report, results
from experiments.goodput.ideas import IDEAS
from experiments.goodput.points import NUM_WINDOWS, POINTS
from slosched.cli.console import console, progress_bar

app = typer.Typer(
    help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)


@app.command()
def run() -> None:
    """Play all of it, a quarter of an hour on one core, and make the page.

    Example: `python -m experiments.goodput run`.
    """
    begin_s = time.monotonic()
    cases = list(product(POINTS, IDEAS, range(NUM_WINDOWS)))
    with progress_bar() as progress:
        rows = [
            results.play(idea, point, window)
            for point, idea, window in progress.track(cases, description="replaying")
        ]
    results.write(results.RESULTS, pd.DataFrame(rows))
    minutes = (time.monotonic() - begin_s) / 60
    results.write(results.PROVENANCE, results.provenance(minutes))
    _report()


@app.command("report")
def make_report() -> None:
    """Make README.md of the committed results, introduction.md and findings.md.

    Example: `python -m experiments.goodput report`.
    """
    _report()


def _report() -> None:
    report.PAGE.write_text(report.text(), encoding="utf-8")
    console.print(f"wrote {report.PAGE}")


if __name__ == "__main__":
    start(app)
