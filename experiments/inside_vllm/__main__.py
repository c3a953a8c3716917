"""`python -m experiments.inside_vllm`: real vLLM, its own scheduler against slosched's policies."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated

import typer

from experiments.command import add_report, make_app, start
from experiments.inside_vllm import report
from experiments.inside_vllm.results import RUNS, TUNING, Book
from experiments.inside_vllm.session import Session, seconds_of
from experiments.inside_vllm.setups import SETUPS, Setup, smoke
from slosched.cli.console import console

app = make_app(__doc__)
_SMOKE_FOLDER = Path("runs/inside_vllm/smoke")

SetupName = Annotated[str, typer.Argument(metavar="SETUP", help=f"One of {', '.join(SETUPS)}.")]
Repeats = Annotated[
    int | None,
    typer.Option(min=1, help="Parts of the trace at each rate.  Default: the setup's own."),
]
Since = Annotated[
    str,
    typer.Option(
        metavar="ISO TIME", help="Measure again what was measured before, as 2026-11-21T22:00."
    ),
]


@app.command()
def tune(
    name: SetupName,
    windows: Annotated[int, typer.Option(min=1, help="Parts of the trace at each rate.")] = 1,
    since: Since = "",
) -> None:
    """Find vLLM's best --max-num-batched-tokens, on other parts of the trace than `run` plays.

    Example: `python -m experiments.inside_vllm tune conv-h100`.
    """
    session = Session(Book(since=since))
    session.tune(_setup(name), windows)
    best = session.book.best_budget(name)
    console.print(f"best for {name}: --max-num-batched-tokens {best}")


@app.command("run")
def run_setup(
    name: SetupName,
    repeats: Repeats = None,
    since: Since = "",
) -> None:
    """Play every part at every rate to vLLM's own scheduler, tuned, and to slosched's policies.

    Stop it with Ctrl-C and run it again: what has been measured is kept and not measured again.

    Example: `python -m experiments.inside_vllm run conv-h100 --repeats 8`.
    """
    Session(Book(since=since)).run(_setup(name), repeats)


@app.command()
def simulate(
    name: SetupName,
    refit: Annotated[
        bool, typer.Option(help="Fit the latency model anew to what was recorded.")
    ] = True,
) -> None:
    """Predict every run that was measured, with a latency model of vLLM's own recorded steps.

    Example: `python -m experiments.inside_vllm simulate conv-h100`.
    """
    Session().simulate(_setup(name), refit=refit)


add_report(app, "inside_vllm", report.PAGE, report.write)


@app.command("all")
def play_all(
    names: Annotated[list[str], typer.Argument(metavar="SETUP...", help="In this order.")],
    repeats: Repeats = None,
    since: Since = "",
    minutes: Annotated[
        float, typer.Option(min=0, help="Begin no run after so long, and report what there is.")
    ] = math.inf,
    is_smoke: Annotated[
        bool, typer.Option("--smoke", help=f"A few requests, to {_SMOKE_FOLDER}, counted anyhow.")
    ] = False,
) -> None:
    """Tune, run, simulate and report, one setup after the other; says first how long it takes.

    The same command goes on where it was stopped.

    Examples: `python -m experiments.inside_vllm all conv-h100 --smoke` in a few minutes,
    `python -m experiments.inside_vllm all code-h100 conv-h100 --since 2026-11-21T22:00`.
    """
    setups = [_setup(name) for name in names]
    book, folder, page = Book(since=since), Path("runs/inside_vllm"), report.PAGE
    if is_smoke:
        setups = [smoke(setup) for setup in setups]
        book, folder = Book(_SMOKE_FOLDER, math.inf, since), _SMOKE_FOLDER
        page = folder / "inside_vllm.md"
    session = Session(book, folder, time.monotonic() + 60 * minutes)
    for setup in setups:
        heats = [session.missing(TUNING, setup, 1), session.missing(RUNS, setup, repeats)]
        console.print(
            f"{setup.name}: {len(heats[0])} runs to tune vLLM, {len(heats[1])} to compare, about "
            f"{seconds_of(*heats) / 60:.0f} minutes"
        )
    for setup in setups:
        session.tune(setup, 1)
        session.run(setup, repeats)
        session.simulate(setup, refit=True)
    report.write(page, book)
    console.print(f"wrote {page} and its figure")


def _setup(name: str) -> Setup:
    if name not in SETUPS:
        raise ValueError(f"no setup {name!r}; there are {', '.join(SETUPS)}")
    return SETUPS[name]


if __name__ == "__main__":
    start(app)
