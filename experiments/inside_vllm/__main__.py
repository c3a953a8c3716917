"""`python -m experiments.inside_vllm`: real vLLM, its own scheduler against slosched's policies."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from experiments.command import add_report, make_app, start
from experiments.inside_vllm import report, shadow_tries
from experiments.inside_vllm.heats import heats_to_run, heats_to_tune
from experiments.inside_vllm.results import RUNS, TUNING, Book
from experiments.inside_vllm.session import Session, seconds_of
from experiments.inside_vllm.setups import SETUPS, Setup, smoke
from experiments.inside_vllm.virtual_setups import VIRTUAL_SETUPS, with_finalists
from experiments.inside_vllm.virtual_time import VIRTUAL_RESULTS, VirtualSession
from slosched.cli.console import console

app = make_app(__doc__)
_SMOKE_FOLDER = Path("runs/inside_vllm/smoke")

SetupName = Annotated[
    str, typer.Argument(metavar="SETUP", help=f"One of {', '.join({**SETUPS, **VIRTUAL_SETUPS})}.")
]
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
Warp = Annotated[
    bool,
    typer.Option(
        "--warp",
        help="Play in virtual time, without API servers; run it with .venv-vllm/bin/python.",
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="Processes that play in virtual time.  Default: one for each core."),
]


@app.command()
def tune(
    name: SetupName,
    windows: Repeats = None,
    since: Since = "",
    is_warped: Warp = False,
    workers: Workers = None,
) -> None:
    """Find vLLM's best --max-num-batched-tokens, on other parts of the trace than `run` plays.

    Examples: `python -m experiments.inside_vllm tune conv-h100`,
    `.venv-vllm/bin/python -m experiments.inside_vllm tune conv-h100 --warp`.
    """
    session = _session(is_warped, since, workers)
    session.tune(_setup(name, is_warped), windows)
    best = session.book.best_budget(name)
    console.print(f"best for {name}: --max-num-batched-tokens {best}")


@app.command("run")
def run_setup(
    name: SetupName,
    repeats: Repeats = None,
    since: Since = "",
    is_warped: Warp = False,
    plays_finalists: Annotated[
        bool, typer.Option("--finalists", help="With --warp: the arena's finalists play, too.")
    ] = False,
    workers: Workers = None,
) -> None:
    """Play every part at every rate to vLLM's own scheduler, tuned, and to slosched's policies.

    Stop it with Ctrl-C and run it again: what has been measured is kept and not measured again.

    Examples: `python -m experiments.inside_vllm run conv-h100 --repeats 8`,
    `.venv-vllm/bin/python -m experiments.inside_vllm run conv-h100 --warp --finalists`.
    """
    setup = _setup(name, is_warped)
    if plays_finalists and not is_warped:
        raise ValueError("--finalists play in virtual time only: add --warp")
    if plays_finalists:
        setup = with_finalists(setup)
    _session(is_warped, since, workers).run(setup, repeats)


@app.command()
def sample(
    name: SetupName,
    repeats: Annotated[int, typer.Option(min=1, help="Parts of the trace at each rate.")] = 2,
    slowdown: Annotated[
        float, typer.Option(min=1, help="How many times as long as on the device everything takes.")
    ] = 3.0,
    since: Since = "",
) -> None:
    """Play the first parts in real time and in virtual time, to see if they agree.

    Where other programs run beside it, take a slowdown that makes their delays small.

    Example: `.venv-vllm/bin/python -m experiments.inside_vllm sample conv-h100 --slowdown 20`.
    """
    setup = _setup(name, is_warped=True)
    # A device that is emulated in real time sleeps, so all systems play at the same time.
    session = VirtualSession(Book(VIRTUAL_RESULTS, since=since), len(setup.policies) + 1)
    session.sample(setup, repeats, slowdown)


@app.command()
def simulate(
    name: SetupName,
    refit: Annotated[
        bool, typer.Option(help="Fit the latency model anew to what real servers recorded.")
    ] = True,
    is_warped: Warp = False,
    rates: Annotated[
        list[float] | None, typer.Option("--rate", help="In virtual time: only at these rates.")
    ] = None,
) -> None:
    """Predict every run that was measured, with a latency model of vLLM's own recorded steps.

    In virtual time steps take exactly as long as the emulated device's model says: it is used.

    Example: `python -m experiments.inside_vllm simulate conv-h100`.
    """
    if rates and not is_warped:
        raise typer.BadParameter("--rate goes with --warp")
    setup = _setup(name, is_warped)
    if is_warped:
        VirtualSession().simulate(with_finalists(setup), rates or ())
    else:
        Session().simulate(setup, refit=refit)


@app.command()
def shadow() -> None:
    """Say in ten set-ups what a policy would gain, in shadow mode, then switch and see.

    Example: `.venv-vllm/bin/python -m experiments.inside_vllm shadow` (some minutes).
    """
    rows = []
    for row in shadow_tries.rows():
        rows.append(row)
        console.print(shadow_tries.line(row), highlight=False, soft_wrap=True)
        pd.DataFrame(rows).to_csv(VIRTUAL_RESULTS / "shadow.csv", index=False, float_format="%.5g")


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
        heats = [
            session.missing(TUNING, heats_to_tune(setup)),
            session.missing(RUNS, heats_to_run(setup, repeats)),
        ]
        console.print(
            f"{setup.name}: {len(heats[0])} runs to tune vLLM, {len(heats[1])} to compare, about "
            f"{seconds_of(*heats) / 60:.0f} minutes"
        )
    for setup in setups:
        session.tune(setup)
        session.run(setup, repeats)
        session.simulate(setup, refit=True)
    report.write(page, book)
    console.print(f"wrote {page} and its figure")


def _session(is_warped: bool, since: str, workers: int | None) -> Session | VirtualSession:
    if is_warped:
        return VirtualSession(Book(VIRTUAL_RESULTS, since=since), workers or os.cpu_count() or 1)
    return Session(Book(since=since))


def _setup(name: str, is_warped: bool = False) -> Setup:
    setups = VIRTUAL_SETUPS if is_warped else SETUPS
    if name not in setups:
        kind = "setup that is played in virtual time is called" if is_warped else "setup"
        raise ValueError(f"no {kind} {name!r}; there are {', '.join(setups)}")
    return setups[name]


if __name__ == "__main__":
    start(app)
