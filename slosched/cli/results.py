"""Replays side by side, as a table for the terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from slosched.cli.console import table
from slosched.core import DeadlineRule
from slosched.evaluate.metrics import RequestRecord, StepRow, Summary, summarize

COLUMNS = (
    "policy",
    "good/s",
    "good",
    "rejected",
    "TTFT p50",
    "TTFT p99",
    "TPOT p50",
    "TPOT p99",
    "preempt",
)


@dataclass
class Outcome:
    """One policy's replay."""

    records: Sequence[RequestRecord]
    steps: list[StepRow] = field(default_factory=list)


def summarize_all(outcomes: Mapping[str, Outcome], rule: DeadlineRule) -> dict[str, Summary]:
    return {name: summarize(outcome.records, rule) for name, outcome in outcomes.items()}


def outcome_table(title: str, summaries: Mapping[str, Summary]) -> Table:
    return table(title, COLUMNS, [outcome_row(name, s) for name, s in summaries.items()])


def outcome_row(name: str, summary: Summary) -> tuple[str, ...]:
    return (
        name,
        _rate(summary.good_requests_per_s),
        f"{summary.attainment:.1%}",
        f"{summary.num_rejected / summary.num_offered:.1%}",
        _time(summary.ttft_s.p50),
        _time(summary.ttft_s.p99),
        _time(summary.tpot_s.p50),
        _time(summary.tpot_s.p99),
        str(summary.num_preemptions),
    )


def _rate(per_s: float) -> str:
    return "-" if math.isnan(per_s) else f"{per_s:.3g}"


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"
