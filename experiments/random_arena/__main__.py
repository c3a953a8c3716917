"""`python -m experiments.random_arena`: policies on cells that are drawn at random from a seed.

`python -m experiments.arena random` is the same as `random` here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from experiments.command import add_report, make_app, provenance, start
from experiments.random_arena import again, report, results
from experiments.random_arena.cells import draw
from experiments.random_arena.contenders import contenders
from experiments.random_arena.play import Match, Row, prepare_nothing
from slosched.cli.console import console, progress_bar
from slosched.evaluate.capacity import local_pool

app = make_app(__doc__)

NumCells = Annotated[int, typer.Option("--cells", min=1, help="Cells to draw.")]
Seed = Annotated[int, typer.Option(min=0, help="What the cells are drawn from.")]


@app.command("random")
def run(
    cells: NumCells = 60,
    seed: Seed = report.REPORT_SEED,
    only: Annotated[
        int | None, typer.Option(metavar="CELL", min=0, help="The cell of this number alone.")
    ] = None,
    portfolio: Annotated[
        bool, typer.Option("--portfolio", help="Let `portfolio` take part, too; takes longer.")
    ] = False,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", min=1, help="Cells played side by side.")
    ] = 1,
) -> None:
    """Draw cells, tune and measure all contenders in each, and make the page.

    Example: `python -m experiments.arena random --cells 60 --seed 2`; one cell again:
    `python -m experiments.arena random --seed 2 --only 17`.

    A cell takes a minute or so of a core.  Stop it with Ctrl-C, and the same command goes on: each
    cell is kept when it is done, in experiments/random_arena/results.jsonl.  Results of other code
    are played again, so run it from a tree that is not edited meanwhile.
    """
    entries = contenders(portfolio=portfolio)
    names = " ".join(entry.name for entry in entries)
    digest = str(provenance("random_arena")["code_digest"])
    known = results.done(results.read(), names, digest)
    drawn = [draw(seed, number) for number in (range(cells) if only is None else [only])]
    pending = [cell for cell in drawn if cell.name not in known or only is not None]
    with progress_bar() as progress, local_pool(jobs)(prepare_nothing) as pool:
        task = progress.add_task("cells", total=len(drawn), completed=len(drawn) - len(pending))

        def keep(row: Row) -> None:
            results.append(row)
            console.print(report.line(row))
            progress.advance(task)

        try:
            futures = []
            for cell in pending:
                future = pool.submit(Match(cell, entries).row)
                future.add_done_callback(lambda f: None if f.exception() else keep(f.result()))
                futures.append(future)
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)
    make_report()


@app.command("list")
def show(cells: NumCells = 60, seed: Seed = report.REPORT_SEED) -> None:
    """Print the cells of a seed.

    Example: `python -m experiments.random_arena list --cells 5 --seed 2`.
    """
    for number in range(cells):
        cell = draw(seed, number)
        console.print(f"{cell.name}: {cell}")


@app.command("again")
def play_again(
    seed: Seed = report.FORMER_SEEDS[-1],
    only: Annotated[
        list[int] | None, typer.Option(metavar="CELL", min=0, help="Cells; by default all.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="The policy; by default ours with its stored setting."),
    ] = None,
) -> None:
    """Play our policy again where stored results say how others and it did; print a table.

    Example: `python -m experiments.random_arena again --seed 3 --only 27 --only 5`.
    """
    rows = [row for row in results.read() if row["cell"]["seed"] == seed]
    chosen = [row for row in rows if only is None or row["cell"]["number"] in only]
    console.print(again.text(chosen, policy), soft_wrap=True)


make_report = add_report(app, "random_arena", report.PAGE, report.write)


if __name__ == "__main__":
    start(app)
