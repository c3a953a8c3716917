"""`slosched explain`: what a portfolio chose in a replay, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slosched.cli.console import console
from slosched.core import NO_SLO, DeadlineRule
from slosched.metrics import RequestColumns, good_requests
from slosched.policy.portfolio.explanation import explained
from slosched.replay.evaluations import read_evaluations
from slosched.replay.files import Replay, read_records

_RECORDS = "records.jsonl"
_FEW = 0.02
"""The share of lost promises up to which nearly all were kept."""


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
        console.print(_why_none(run), soft_wrap=True)
        return
    changes = sum(e.chosen != e.before for e in evaluations)
    cpu_s = sum(e.cpu_s for e in evaluations)
    console.print(
        f"{len(evaluations)} evaluations, {changes} changes, {cpu_s:.1f} s of processor time."
    )


def _why_none(run: Path) -> str:
    """Say why a portfolio never asked, as far as the records of its replay tell."""
    if not (run / _RECORDS).exists():
        return "The portfolio never asked."
    num_promised, num_lost = _promised_and_lost(read_records(run / _RECORDS))
    if not num_promised:
        return (
            "There was nothing to judge: no request was promised a time, so the portfolio never "
            "asked.  Promise something, for example with --slo-ttft 1s --slo-tpot 50ms."
        )
    if num_lost <= _FEW * num_promised:
        return "The portfolio never asked: nearly all promises were kept."
    return (
        f"The portfolio never asked, though {num_lost} of {num_promised} promises were not kept: "
        "nobody could have kept them, or they were too few or too late for a question."
    )


def _promised_and_lost(replay: Replay) -> tuple[int, int]:
    """Return how many requests were promised a time, and for how many of them it was not kept."""
    promised = [record for record in replay.records if record.slo != NO_SLO]
    if not promised:
        return 0, 0
    rule = DeadlineRule(str(replay.provenance.get("limit deadline_rule", DeadlineRule.ENVELOPE)))
    good = good_requests(RequestColumns.of(promised), rule)
    return len(promised), int((~good).sum())
