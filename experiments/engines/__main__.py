"""`python -m experiments.engines`: play known behaviours of today's engines, and make the page."""

from __future__ import annotations

from typing import Annotated

import typer

from experiments.command import add_report, make_app, start
from experiments.engines import report, results
from experiments.engines.budgets import BUDGETS
from experiments.engines.overlapping import OVERLAPPING
from experiments.engines.prefixes import PREFIXES
from experiments.engines.pressure import PRESSURE
from experiments.engines.running import run_studies
from experiments.engines.stalls import STALLS
from experiments.engines.study import Scale

STUDIES = (STALLS, BUDGETS, PREFIXES, PRESSURE, OVERLAPPING)
_BY_NAME = {study.name: study for study in STUDIES}
_DEFAULT = Scale()

app = make_app(__doc__)


@app.command()
def run(
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help=f"These studies alone, of {', '.join(_BY_NAME)}."),
    ] = None,
    windows: Annotated[
        int, typer.Option(min=2, help="Parts of each trace that are played.")
    ] = _DEFAULT.num_windows,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=30, help="Requests in each.")
    ] = _DEFAULT.window_requests,
) -> None:
    """Play everything and make the page: some minutes on one core.

    Example: `python -m experiments.engines run --only stalls`.
    """
    run_studies(_BY_NAME, only, Scale(windows, requests), results.HERE, "engines")
    make_report()


def _write() -> None:
    report.write([study for study in STUDIES if results.path_of(study.name).exists()])


make_report = add_report(app, "engines", report.PAGE, _write)

if __name__ == "__main__":
    start(app)
