"""`python -m profiling.gpu`: measure the torch engine on a GPU, in stages of less than ten minutes.

Each stage goes on where an earlier run of it ended.  `profile` comes before `fit`, `fit` before
`predict` and `roofline`, and `predict` before `traffic`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import typer

from profiling.gpu.backends import check_conformance
from profiling.gpu.models import fit_all, free_memory, profile
from profiling.gpu.report import page_of, write_page
from profiling.gpu.results import noted, write_json
from profiling.gpu.roofline import measure_rooflines
from profiling.gpu.scale import HERE, ON_GPU, REHEARSAL, Scale
from profiling.gpu.swaps import measure_swaps
from profiling.gpu.traffic import predict_all, predictions, replay_all
from slosched.cli.console import complain, console
from slosched.core import SloschedError
from slosched.perfmodel import load_model

PREDICTIONS = HERE / "predictions.json"
BUNDLED = ("h100/llama-3.1-8b", "h200/llama-3.1-8b")

STAGES: dict[str, Callable[[Scale, Path], None]] = {
    "conformance": check_conformance,
    "profile": profile,
    "fit": fit_all,
    "predict": predict_all,
    "swap": measure_swaps,
    "roofline": measure_rooflines,
    "traffic": replay_all,
}
Stage = StrEnum("Stage", [*STAGES, "all"])  # type: ignore[misc]

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False)


@app.command()
def run(
    stage: Annotated[Stage, typer.Argument(help="The stage; all runs them in this order.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder of results: runs/gpu.")],
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="A tiny model on the CPU, in seconds.")
    ] = False,
    attention: Annotated[
        list[str] | None,
        typer.Option(help="A backend to measure; may be repeated. By default all that run."),
    ] = None,
) -> None:
    """Run a stage, or go on with it.

    Examples:

    - `python -m profiling.gpu run conformance --out runs/gpu`
    - `python -m profiling.gpu run all --out runs/rehearsal --rehearse`
    """
    scale = REHEARSAL if rehearse else ON_GPU
    if attention:
        scale = replace(scale, backends=tuple(attention))
    if not rehearse and not torch.cuda.is_available():
        raise ValueError("torch sees no GPU: use a machine that has one, or give --rehearse")
    for name in STAGES if stage == "all" else [stage.value]:
        with noted(out, name, scale):
            STAGES[name](scale, out)
        free_memory()
        console.print(f"stage {name} is done: {out}")


@app.command()
def predict() -> None:
    """Predict every attainment with the bundled models; the file is committed before any run.

    Example: `python -m profiling.gpu predict`.
    """
    write_json(PREDICTIONS, {name: predictions(ON_GPU, load_model(name)) for name in BUNDLED})
    console.print(f"wrote {PREDICTIONS}")


@app.command()
def report(
    results: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Its results.")],
    page: Annotated[
        Path | None,
        typer.Option(
            help="The page to write: by default docs/gpu.md, or gpu.md beside a rehearsal's results"
        ),
    ] = None,
) -> None:
    """Make the page docs/gpu.md out of a folder of results.

    Example: `python -m profiling.gpu report runs/gpu`.
    """
    page = page or page_of(results)
    write_page(results, PREDICTIONS, page)
    console.print(f"wrote {page}")


if __name__ == "__main__":
    try:
        app()
    except (SloschedError, ValueError, OSError) as error:
        complain(error)
        raise SystemExit(1) from error
