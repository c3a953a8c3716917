"""`python -m experiments.arena`: run the comparison, list what is compared, make the page."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from experiments.arena import costs, finalists, report
from experiments.arena.carry_over import Again, carry_over, play_again, sample
from experiments.arena.ceilings import ceilings, lasting
from experiments.arena.contenders import chosen
from experiments.arena.oracle import oracle
from experiments.arena.results import Results
from experiments.arena.rows import knee_of
from experiments.arena.scenarios import SCALES, SCENARIOS, Scale, Scenario
from experiments.arena.tournament import Tournament
from experiments.command import add_report, make_app, provenance, start
from experiments.random_arena import __main__ as random_arena
from slosched.cli.console import console, progress_bar, table
from slosched.evaluate.capacity import Store, local_pool
from slosched.evaluate.capacity.pool import give
from slosched.evaluate.judge import scenarios
from slosched.evaluate.judge.knee import find_knees
from slosched.evaluate.judge.play import Stage
from slosched.evaluate.judge.promises import PROMISED
from slosched.evaluate.judge.scenarios import KNEES_FILE
from slosched.evaluate.judge.time_limit import NO_LIMIT

app = make_app(__doc__)
_STORE = Path("runs/arena/points.sqlite")

Only = Annotated[
    str | None, typer.Option(metavar="NAME,…", help="These scenarios alone; `list` names them.")
]
Policies = Annotated[
    str | None, typer.Option(metavar="NAME,…", help="These policies or contenders alone.")
]
ScaleName = Annotated[
    str, typer.Option("--scale", help=f"How much is simulated: {' or '.join(SCALES)}.")
]


@app.command()
def run(
    only: Only = None,
    policies: Policies = None,
    scale: ScaleName = "quick",
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Processes.  Default: one a core.")
    ] = None,
    keep_tuning: Annotated[
        bool, typer.Option("--keep-tuning", help="Take the settings of tuned.csv as they are.")
    ] = False,
    retune: Annotated[
        str | None,
        typer.Option(metavar="NAME,…", help="Tune these alone, the others as --keep-tuning."),
    ] = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="Also what this code has measured already.")
    ] = False,
    store: Annotated[Path, typer.Option(help="Where every replay is kept.")] = _STORE,
) -> None:
    """Tune and measure every contender in every scenario, and make the page.

    Example: `python -m experiments.arena run --only conv-tight --scale quick --jobs 2`.

    Stop it with Ctrl-C and run it again to continue.  Every edit to the code that a replay runs
    makes all replays new, so run it from a tree that is not edited meanwhile.  An edit to one
    policy concerns that policy alone: `--retune NAME` plays again what it changes.
    """
    results = Results()
    with Store(store) as kept:
        field = chosen(_names(policies))
        retuned = _retuned(keep_tuning, retune, [entry.name for entry in field])
        tournament = Tournament(field, _scale(scale), results, kept, jobs, retuned)
        wanted = _scenarios(only)
        pending = [s for s in wanted if anew or not tournament.is_done(s)]
        for scenario in wanted:
            if scenario not in pending:
                console.print(f"{scenario.name}: measured already (--anew measures it again)")
        if pending:
            _play(tournament, pending, jobs)
    make_report()


@app.command("list")
def show(scale: ScaleName = "quick") -> None:
    """Print the scenarios, and the contenders with the values that are tried.

    Example: `python -m experiments.arena list`.
    """
    rows = [[s.name, s.model, str(s.source), s.promise, s.rule] for s in SCENARIOS.values()]
    console.print(table("scenarios", ["name", "device", "requests", "promise", "rule"], rows))
    rows = [[name, text] for name, text in PROMISED.items()]
    console.print(table("promises", ["name", "TTFT, TPOT"], rows))
    rows = [
        [e.name, e.group, "; ".join(f"{k}: {' '.join(v)}" for k, v in e.values.items())]
        for e in chosen(None)
    ]
    most = _scale(scale).max_trials
    console.print(
        table(f"contenders, up to {most} settings each", ["name", "class", "tried"], rows)
    )


@app.command()
def estimate(
    only: Only = None,
    policies: Policies = None,
    scale: ScaleName = "quick",
    jobs: Annotated[int | None, typer.Option("--jobs", "-j", min=1, help="Processes.")] = None,
) -> None:
    """Estimate how long a run will take, by playing a few requests of each scenario.

    Example: `python -m experiments.arena estimate --only conv-tight,code-medium`.
    """
    with Store(_STORE) as kept:
        tournament = Tournament(chosen(_names(policies)), _scale(scale), Results(), kept, jobs)
        total_s = 0.0
        for scenario in _scenarios(only):
            seconds = tournament.estimate_s(scenario, _num_jobs(jobs))
            total_s += seconds
            console.print(f"{scenario.name}: about {seconds / 60:.0f} min")
        console.print(f"in all about {total_s / 60:.0f} min on {_num_jobs(jobs)} processes")


@app.command("ceilings")
def make_ceilings(
    only: Only = None,
    scale: ScaleName = "quick",
    anew: Annotated[bool, typer.Option("--anew", help="Also what is there already.")] = False,
) -> None:
    """Find the rates above which no schedule reaches an attainment, and the most under overload.

    Example: `python -m experiments.arena ceilings --only conv-tight`.  A minute or two a scenario,
    which must have been measured.
    """
    results = Results()
    for scenario in _scenarios(only):
        knee = knee_of(results.tables(), scenario.name)
        with console.status(f"{scenario.name}: solving"):
            found = {"lasting": lasting(scenario, _scale(scale), knee)}
            # These do not depend on the contenders, and take longest.
            if anew or results.of("ceilings", scenario.name).empty:
                found["ceilings"] = ceilings(scenario, _scale(scale))
        made = {"scenario": scenario.name, "scale": scale, **provenance("arena")}
        for kind, rows in found.items():
            results.put(kind, scenario.name, pd.DataFrame({**made, **row} for row in rows))
        console.print(f"{scenario.name}: done")


@app.command("oracle")
def make_oracle(only: Only = None, scale: ScaleName = "quick") -> None:
    """Play `goodput` again with known output lengths, and with more memory; a minute or two a
    scenario.

    Example: `python -m experiments.arena oracle --only conv-tight`.  It takes rates and settings
    from the results of `run`.
    """
    results = Results()
    for scenario in _scenarios(only):
        with console.status(f"{scenario.name}: playing"):
            found = list(oracle(scenario, _scale(scale), results.tables()))
        made = {"scenario": scenario.name, "scale": scale, **provenance("arena")}
        results.put("oracle", scenario.name, pd.DataFrame({**made, **row} for row in found))
        console.print(f"{scenario.name}: done")


@app.command()
def cost() -> None:
    """Time a decision of every policy with 256 running and 1,000 waiting.  Nothing else may run.

    Example: `python -m experiments.arena cost`.
    """
    Results().write("cost", costs.measure())


@app.command("carry-over")
def take_over(
    num_rows: Annotated[
        int, typer.Option("--sample", min=1, help="Stored rows that are played again.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="Which rows are drawn.")] = 0,
) -> None:
    """Play some stored results again; if none differs, take all as results of today's code.

    Use it after changes that are meant to leave every decision as it is.

    Example: `python -m experiments.arena carry-over --sample 16 --seed 1`.
    """

    def say(again: Again) -> None:
        row = again.stored
        console.print(
            f"{row['scenario']}, {row['contender']} at {row['load']:g}x: stored "
            f"{row['attainment']:.6g}, today {again.attainment:.6g}"
        )

    results = Results()
    replays = play_again(results, sample(results, num_rows, seed))
    num_carried = carry_over(results, replays, say)
    console.print(
        f"taken over: {num_carried} scenarios, {num_rows} rows of which came out the same"
    )


@app.command("knees")
def make_knees() -> None:
    """Find the knees of the scenarios of `slosched judge`, and write them where it reads them.

    Example: `python -m experiments.arena knees`, after `finalists`.
    """
    every = scenarios()
    with local_pool()(partial(give, Stage(every))) as pool:
        knees = find_knees(every, None, pool, NO_LIMIT)
    KNEES_FILE.write_text(json.dumps(knees, indent=1) + "\n", encoding="utf-8")


@app.command("finalists")
def make_finalists() -> None:
    """Write the scenarios and the best of each class for `slosched judge`.

    Example: `python -m experiments.arena finalists`.
    """
    finalists.write(Results())


app.command("random")(random_arena.run)
make_report = add_report(app, "arena", report.PAGE, lambda: report.write(Results()))


def _play(tournament: Tournament, pending: Sequence[Scenario], jobs: int | None) -> None:
    """Play the scenarios with an estimate first, a bar over all replays, and a line for each."""
    first_s = tournament.estimate_s(pending[0], _num_jobs(jobs))
    console.print(
        f"{pending[0].name} will take about {first_s / 60:.0f} min on {_num_jobs(jobs)} "
        f"processes, of {len(pending)} scenarios (`estimate` plays some requests of each)"
    )
    expected = tournament.num_replays()
    with progress_bar() as progress:
        task = progress.add_task("replays", total=expected * len(pending))
        done = 0
        for scenario in pending:
            progress.update(task, description=scenario.name, completed=done)
            seconds = tournament.play(scenario, lambda: progress.advance(task))
            done += expected
            console.print(f"{scenario.name}: {seconds / 60:.1f} min")


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _retuned(keep: bool, text: str | None, field: Sequence[str]) -> list[str] | None:
    """Return the names to tune; None for all.  Raises ValueError for a name that does not play."""
    names = _names(text)
    if unknown := [name for name in names if name not in field]:
        raise ValueError(f"no contender {', '.join(unknown)}; there are {', '.join(field)}")
    return names if keep or names else None


def _scenarios(only: str | None) -> list[Scenario]:
    names = _names(only) or list(SCENARIOS)
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise ValueError(f"no scenario {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in names]


def _scale(name: str) -> Scale:
    if name not in SCALES:
        raise ValueError(f"no scale {name!r}; there are {', '.join(SCALES)}")
    return SCALES[name]


def _num_jobs(jobs: int | None) -> int:
    return jobs or os.cpu_count() or 1


if __name__ == "__main__":
    start(app)
