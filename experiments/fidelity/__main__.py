"""`python -m experiments.fidelity`: the simulator against real engines, and the page about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from experiments.command import add_report, make_app, start
from experiments.fidelity import demo_runs, full, models, report, results, sharegpt
from experiments.fidelity.collect import collect as collect_stages
from experiments.fidelity.play import play
from experiments.fidelity.stages import Run, read_runs, write_stages
from slosched.cli.console import console, progress_bar
from slosched.perfmodel import FittedModel

app = make_app(__doc__)

_Backend = Annotated[
    str | None,
    typer.Option(
        help=f"Whose kernels: {', '.join(models.BACKENDS)}.  Default: those that slosched chooses."
    ),
]
_Only = Annotated[
    str | None, typer.Option(metavar="TEXT", help="These runs alone, whose names contain it.")
]

_GIT_HELP = "The git directory of a clone of github.com/"


@app.command()
def collect(
    training: Annotated[Path, typer.Option(help=f"{_GIT_HELP}inference-sim/training.")],
    validation: Annotated[
        Path, typer.Option(help=f"{_GIT_HELP}inference-sim/sim-to-real-accuracy-validation.")
    ],
    simulator: Annotated[Path, typer.Option(help=f"{_GIT_HELP}inference-sim/inference-sim.")],
    llmservingsim: Annotated[Path, typer.Option(help=f"{_GIT_HELP}casys-kaist/LLMServingSim.")],
) -> None:
    """Collect what was measured from clones; the results are in the repository already.

    Example: `python -m experiments.fidelity collect --training training/.git …`.
    """
    write_stages(collect_stages(training, validation, simulator))
    sharegpt.collect(llmservingsim)
    console.print(f"wrote {', '.join(str(p) for p in sharegpt.MEASURED.glob('*.csv'))}")


@app.command()
def compose(backend: _Backend = None, only: _Only = None) -> None:
    """Compose the latency models from AIConfigurator's tables (needs the extra `aiconfigurator`).

    Example: `python -m experiments.fidelity compose --backend trtllm --only mixtral`.
    """
    for server in sorted({_server(run) for run in _runs(only)}):
        console.print(f"fitted {models.compose(server, backend)}")


@app.command()
def demo(
    agreement: Annotated[Path, typer.Argument(help="The agreement.csv that a demo left.")],
    name: Annotated[str, typer.Option(help="The run's name: when it ran, say.")],
    machine: Annotated[str, typer.Option(help="The machine, and what else ran on it.")],
) -> None:
    """Add a run of `slosched demo` to those that the page compares, and make the page.

    Example: `python -m experiments.fidelity demo runs/demo/agreement.csv --name "2026-11-23, 1" …`.
    """
    demo_runs.collect(agreement, name, machine)
    make_page()


@app.command()
def run(backend: _Backend = None, only: _Only = None) -> None:
    """Simulate every measured run, and make the page: ten minutes on a quiet core.

    Example: `python -m experiments.fidelity run --only codellama`.
    """
    with progress_bar() as progress:
        for measured in progress.track(_runs(only), description="runs on H100"):
            _simulate(measured, backend)
    results.write(sharegpt.NAME, _of_requests())
    make_page()


@app.command(name="full")
def full_servers() -> None:
    """Simulate full servers with steps as long as measured, and make the page: some minutes.

    Example: `python -m experiments.fidelity full`.
    """
    with progress_bar() as progress:
        runs = progress.track([r for r in _runs(None) if full.is_full(r)], description="full")
        rows = [full.play_with_measured_steps(run, _model(run, None)) for run in runs]
    results.write(full.FULL, pd.DataFrame(rows))
    make_page()


def _of_requests() -> pd.DataFrame:
    return pd.DataFrame(row for run in sharegpt.RUNS for row in sharegpt.simulate_both(run))


def _simulate(measured: Run, backend: str | None) -> None:
    """Play a run with a backend's tables, by default the chosen ones, and store its rows."""
    backend = backend or models.chosen_backends()[_server(measured)]
    stages = zip(measured, play(measured, _model(measured, backend)), strict=True)
    rows = [
        {"run": stage.run, "stage": stage.stage, "backend": backend, **seen}
        for stage, seen in stages
    ]
    results.replace_run(results.SIMULATED, measured[0].run, rows)


def _model(measured: Run, backend: str | None) -> FittedModel:
    """Return the latency model of a run, by default from the tables that slosched chooses."""
    server = _server(measured)
    return models.load(server, backend or models.chosen_backends()[server])


def _runs(only: str | None) -> list[Run]:
    """Return the measured runs that can be simulated."""
    runs = [r for r in read_runs() if models.has_tables(_server(r)) and (only or "") in r[0].run]
    if not runs:
        raise ValueError(f"no measured run has {only!r} in its name")
    return runs


def _server(measured: Run) -> models.Server:
    return models.Server(measured[0].model, measured[0].tensor_parallel)


make_page = add_report(app, "fidelity", report.PAGE, report.write)

if __name__ == "__main__":
    start(app)
