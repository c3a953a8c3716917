"""`python -m experiments.inside_vllm`: real vLLM, its own scheduler against slosched's policies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import typer

from experiments.command import start
from experiments.inside_vllm import report, results
from experiments.inside_vllm.heats import Heat, run
from experiments.inside_vllm.predict import fitted, predicted
from experiments.inside_vllm.server import Server, started
from experiments.inside_vllm.setups import SETUPS, Setup, System
from slosched.cli.console import console, progress_bar
from slosched.evaluate.capacity.code import tree_digest
from slosched.perfmodel import load_model, save_model

app = typer.Typer(
    help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False
)
_FOLDER = Path("runs/inside_vllm")
_TUNING_WINDOW = 20
"""The first part of the trace on which vLLM is tuned; it is not measured on."""

SetupName = Annotated[str, typer.Argument(metavar="SETUP", help=f"One of {', '.join(SETUPS)}.")]


@app.command()
def tune(
    name: SetupName,
    windows: Annotated[int, typer.Option(min=1, help="Parts of the trace at each rate.")] = 1,
) -> None:
    """Find vLLM's best --max-num-batched-tokens, on other parts of the trace than `run` plays.

    Example: `python -m experiments.inside_vllm tune conv-h100`.
    """
    setup = _setup(name)
    numbers = range(_TUNING_WINDOW, _TUNING_WINDOW + windows)
    _play(results.TUNING, setup, setup.untuned, numbers)
    console.print(f"best for {name}: --max-num-batched-tokens {results.best_budget(name)}")


@app.command("run")
def run_setup(
    name: SetupName,
    repeats: Annotated[int, typer.Option(min=1, help="Parts of the trace at each rate.")] = 5,
) -> None:
    """Play every part at every rate to vLLM's own scheduler, tuned, and to slosched's policies.

    Stop it with Ctrl-C and run it again: what has been measured is kept and not measured again.

    Example: `python -m experiments.inside_vllm run conv-h100 --repeats 5`.
    """
    setup = _setup(name)
    systems = setup.systems(results.best_budget(name))
    _play(results.RUNS, setup, systems, range(repeats))


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
    setup = _setup(name)
    path = results.HERE / f"{name}.json"
    if refit:
        fit = fitted([_steps(setup, system) for system in setup.systems(0) if system.policy])
        save_model(fit.model, path)
        error = fit.held_out
        console.print(f"wrote {path}: held-out error {error.mape:.1f} % on average")
    device = load_model(path)
    runs = results.valid(results.read(results.RUNS))
    runs = runs[runs["setup"] == name]
    with progress_bar() as progress:
        for row in progress.track(runs.to_dict("records"), description=f"simulating {name}"):
            policy = None if row["system"].startswith("vLLM ") else row["system"]
            system = System(int(row["max_num_batched_tokens"]), policy)
            heat = Heat(setup, float(row["rate"]), int(row["window"]))
            results.keep(results.PREDICTIONS, [predicted(heat, system, device)])


@app.command("report")
def make_report() -> None:
    """Make docs/inside_vllm.md and its figure of the results as they are.

    Example: `python -m experiments.inside_vllm report`.
    """
    report.write()
    console.print(f"wrote {report.PAGE} and its figure")


def _play(table: str, setup: Setup, systems: Sequence[System], windows: Sequence[int]) -> None:
    heats = missing(table, setup, windows)
    if not heats:
        console.print(f"{setup.name}: all measured already, see {results.HERE / table}.csv")
        return
    with ExitStack() as stack:
        with console.status(f"starting {len(systems)} servers"):
            servers = stack.enter_context(all_served(setup, systems))
        measure(table, heats, servers)


def missing(table: str, setup: Setup, windows: Sequence[int]) -> list[Heat]:
    """What has not been measured yet, or only while the machine was too busy for it."""
    return [
        Heat(setup, rate, window)
        for window, rate in product(windows, reversed(setup.rates))
        if not results.has(table, setup.name, rate, window)
    ]


def measure(table: str, heats: Sequence[Heat], servers: Mapping[System, Server]) -> None:
    """Each row is kept as soon as its heat is over."""
    facts = {"code_digest": tree_digest()[:16]}
    budgets = {system.name: system.max_num_batched_tokens for system in servers}
    context = get_context("spawn")
    with ProcessPoolExecutor(len(servers), context) as clients, progress_bar() as progress:
        for heat in progress.track(heats, description=heats[0].setup.name):
            made = datetime.now(UTC).isoformat(timespec="seconds")
            rows = [
                row
                | {"max_num_batched_tokens": budgets[str(row["system"])]}
                | {"slowdown": heat.setup.slowdown, "made": made}
                | facts
                for row in run(heat, servers, clients)
            ]
            results.keep(table, rows)
            for row in rows:
                console.print(
                    f"{heat.setup.name} at {heat.rate:g}/s, part {heat.window}: {row['system']} "
                    f"{row['attainment']:.1%} in time, sent {row['max_lateness_s']} s late at most"
                )


@contextmanager
def all_served(setup: Setup, systems: Sequence[System]) -> Iterator[Mapping[System, Server]]:
    """All at once, and all stay up."""
    with ExitStack() as stack:
        servers = {}
        for system in systems:
            steps = _steps(setup, system)
            launch = setup.launch(system, steps.absolute())
            servers[system] = stack.enter_context(started(launch, steps.with_suffix(".log")))
        for server in servers.values():
            server.await_up()
        yield servers


def _steps(setup: Setup, system: System) -> Path:
    """Where the steps of a server are recorded."""
    return _FOLDER / f"{setup.name}-{system.name.replace(' ', '-')}.csv"


def _setup(name: str) -> Setup:
    if name not in SETUPS:
        raise ValueError(f"no setup {name!r}; there are {', '.join(SETUPS)}")
    return SETUPS[name]


if __name__ == "__main__":
    start(app)
