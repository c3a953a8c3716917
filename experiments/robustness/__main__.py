"""`python -m experiments.robustness`: disturb every policy at its own knee, and make the page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from experiments.command import add_report, make_app, start
from experiments.robustness import report
from experiments.robustness.results import Results, provenance
from experiments.robustness.study import POLICIES, WORKLOADS, Scale, WorkloadStudy
from slosched.cli.console import progress_bar
from slosched.evaluate.capacity import Store

app = make_app(__doc__)
_STORE = Path("runs/robustness/points.sqlite")
_DEFAULT = Scale()


@app.command()
def run(
    windows: Annotated[
        int, typer.Option(min=2, help="Parts of each trace that are played.")
    ] = _DEFAULT.num_windows,
    requests: Annotated[
        int, typer.Option("--requests", "-n", min=30, help="Requests in each.")
    ] = _DEFAULT.window_requests,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Processes.  Default: one a core.")
    ] = None,
    store: Annotated[Path, typer.Option(help="Where every replay is kept.")] = _STORE,
) -> None:
    """Measure everything and make the page: a quarter of an hour on two cores.

    Example: `python -m experiments.robustness run --jobs 2`.

    Stop it with Ctrl-C and run it again to continue.  Every edit to the code that a replay runs
    makes all replays new, so run it from a tree that is not edited meanwhile.
    """
    scale = Scale(windows, requests)
    begin_s = time.monotonic()
    rates, losses, lasting = [], [], []
    with Store(store) as kept, progress_bar() as progress:
        for workload in WORKLOADS:
            study = WorkloadStudy(workload, POLICIES, scale, kept, jobs)
            task = progress.add_task(f"{workload.scenario.name}: knees", total=None)

            def on_progress(done: int, total: int, task: object = task) -> None:
                progress.update(task, completed=done, total=total)  # type: ignore[arg-type]

            rates.append(study.rates(on_progress))
            progress.reset(task, description=f"{workload.scenario.name}: disturbed")
            losses.append(study.losses(rates[-1], on_progress))
            progress.reset(task, description=f"{workload.scenario.name}: bounds")
            lasting.append(study.lasting(rates[-1], on_progress))
    minutes = (time.monotonic() - begin_s) / 60
    made = provenance(windows, requests, minutes)
    Results(pd.concat(rates), pd.concat(losses), pd.concat(lasting), made).write()
    make_report()


make_report = add_report(app, "robustness", report.PAGE, lambda: report.write(Results.read()))

if __name__ == "__main__":
    start(app)
