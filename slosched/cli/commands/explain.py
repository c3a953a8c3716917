"""`slosched explain`: what a portfolio chose in a replay, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slosched.cli.console import console
from slosched.policy.portfolio.explanation import explained
from slosched.replay.evaluations import read_evaluations


def explain(
    run: Annotated[
        Path, typer.Argument(help="Folder of a replay, as `slosched replay -o` left it: runs/a.")
    ],
) -> None:
    """Say in plain sentences what a portfolio chose in a simulated replay, and why.

    Example: `slosched replay -p portfolio --rate 16 --slo-ttft 1s --slo-tpot 50ms -o runs/a`, then
    `slosched explain runs/a`.
    """
    evaluations = read_evaluations(run)
    for evaluation in evaluations:
        console.print(" ".join(explained(evaluation)), markup=False, highlight=False)
        console.print()
    if not evaluations:
        console.print(
            "The portfolio never asked: nearly all promises that could be kept were kept."
        )
        return
    changes = sum(e.chosen != e.before for e in evaluations)
    cpu_s = sum(e.cpu_s for e in evaluations)
    console.print(
        f"{len(evaluations)} evaluations, {changes} changes, {cpu_s:.1f} s of processor time."
    )
