"""`python -m experiments.claims`: try claims of 2026 about scheduling, and make the page."""

from __future__ import annotations

from typing import Annotated

import typer

from experiments.claims import report
from experiments.claims.ppas import PPAS
from experiments.claims.residual import RESIDUAL
from experiments.claims.targets import TARGETS
from experiments.claims.victims import COST_AWARE, LCF
from experiments.command import add_report, make_app, start
from experiments.engines.running import run_studies
from experiments.engines.study import Scale

STUDIES = (PPAS, RESIDUAL, TARGETS, LCF, COST_AWARE)
_BY_NAME = {study.name: study for study in reversed(STUDIES)}
_DEFAULT = Scale(num_windows=8, window_requests=300)

app = make_app(__doc__)


@app.command()
def run(
    only: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help=f"These studies alone, of {', '.join(_BY_NAME)}."),
    ] = None,
    windows: Annotated[
        int, typer.Option(min=2, help="Seeds with which each setting is played.")
    ] = _DEFAULT.num_windows,
    requests: Annotated[
        int,
        typer.Option("--requests", "-n", min=30, help="Requests in each; ppas has its own number."),
    ] = _DEFAULT.window_requests,
) -> None:
    """Play everything and make the page: some minutes on one core.

    Example: `python -m experiments.claims run --only ppas`.
    """
    run_studies(_BY_NAME, only, Scale(windows, requests), report.RESULTS, "claims")
    make_report()


make_report = add_report(app, "claims", report.PAGE, lambda: report.write(STUDIES))

if __name__ == "__main__":
    start(app)
