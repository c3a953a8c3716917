"""`python -m experiments.portfolio`: is `portfolio` as good as the best of its candidates?

Every window of a cell is played under each candidate and under `portfolio`.  The judged requests
are cut into blocks, so that differences come with intervals: all policies serve the same requests.
"""

from __future__ import annotations

from typing import Annotated

import pandas as pd
import typer

from experiments.command import add_report, make_app, provenance, start
from experiments.portfolio import drawn_report, report
from experiments.portfolio.cells import CELLS, DESIGN, REPORT
from experiments.portfolio.drawn import rows_of
from experiments.portfolio.play import played
from slosched.cli.console import console
from slosched.policy.portfolio.policy import default_candidates

app = make_app(__doc__)
PORTFOLIO = "portfolio"


@app.command()
def run(
    kind: Annotated[str, typer.Option(help=f"The windows to play: {DESIGN} or {REPORT}.")] = REPORT,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each cell.")] = 2,
    only: Annotated[
        list[str] | None, typer.Option(help="Play only cells whose name contains this text.")
    ] = None,
) -> None:
    """Play all cells and make the page: about half an hour of one core.

    Example: `python -m experiments.portfolio run --windows 2`.

    The results of each cell are written when it is done, in place of those that it had.
    """
    if kind not in (DESIGN, REPORT):
        raise ValueError(f"--kind {kind!r} is neither {DESIGN} nor {REPORT}")
    names = [name for name in CELLS if not only or any(text in name for text in only)]
    if not names:
        raise ValueError(f"no cell is named like {only}; there are {', '.join(CELLS)}")
    for name in names:
        rows = []
        for index in range(windows):
            play = CELLS[name].play(kind, index)
            for spec in (*default_candidates(), PORTFOLIO):
                row = {"kind": kind, "cell": name, "window": index, **played(play, spec)}
                rows.append(row)
        report.replace_cell(pd.DataFrame(rows).assign(**stamp()))
        console.print(f"{name}: done")
    make_report()


@app.command()
def drawn(
    seed: Annotated[int, typer.Option(min=0, help="What the cells are drawn from.")] = 3,
    cells: Annotated[int, typer.Option(min=1, help="Cells to draw.")] = 60,
    only: Annotated[
        list[int] | None, typer.Option(metavar="CELL", help="Only the cells of these numbers.")
    ] = None,
) -> None:
    """Play cells of the random arena and make the page: half a minute to minutes of a core each.

    Example: `python -m experiments.portfolio drawn --seed 2 --only 3 --only 9`.

    The results of each cell are written when it is done, in place of those that it had.
    """
    for number in only or range(cells):
        rows = pd.DataFrame(rows_of(seed, number))
        if len(rows):
            drawn_report.replace_cell(rows.assign(**stamp()))
        console.print(f"{seed}.{number}: {'done' if len(rows) else 'no rate can be served'}")
    make_report()


make_report = add_report(app, "portfolio", report.PAGE, report.write)


def stamp() -> dict[str, str]:
    """Return which code, command and date a result is of."""
    made = provenance("portfolio")
    return {fact: str(made[fact]) for fact in ("code_digest", "command", "made")}


if __name__ == "__main__":
    start(app)
