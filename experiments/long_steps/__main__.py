"""`python -m experiments.long_steps`: what steps longer than a TPOT gain `goodput`, and where.

Every window is played under `goodput`, under `goodput` without long steps, and under the best other
policies of the arena.  All serve the same requests, so that differences come with intervals.
"""

from __future__ import annotations

from typing import Annotated

import pandas as pd
import typer

from experiments.command import add_report, make_app, provenance, start
from experiments.long_steps import report
from experiments.long_steps.cells import CELLS, FIRST_WINDOW, POLICIES
from experiments.portfolio.cells import REPORT
from experiments.portfolio.play import played
from slosched.cli.console import progress_bar

app = make_app(__doc__)


@app.command()
def run(
    windows: Annotated[int, typer.Option(min=1, help="Windows of each cell.")] = 3,
) -> None:
    """Play all cells and make the page: some minutes of one core.

    Example: `python -m experiments.long_steps run`.
    """
    rows: list[dict[str, object]] = []
    with progress_bar() as progress:
        task = progress.add_task("replays", total=len(CELLS) * windows * len(POLICIES))
        for cell in CELLS.values():
            for index in range(windows):
                play = cell.play(REPORT, FIRST_WINDOW + index)
                for name, spec in POLICIES.items():
                    row = {"cell": cell.name, "window": index, **played(play, spec)}
                    rows.append({**row, "policy": name})
                    progress.advance(task)
    report.keep(pd.DataFrame(rows), provenance("long_steps"))
    make_report()


make_report = add_report(app, "long_steps", report.PAGE, report.write)

if __name__ == "__main__":
    start(app)
