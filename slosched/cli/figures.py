"""The figures and report sections of replays.  Imports matplotlib and pandas: load it late."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from slosched.cli.fit import ERROR_COLUMNS, coefficient_rows, error_rows
from slosched.cli.results import COLUMNS, Outcome, outcome_row, summarize_all
from slosched.core import DeadlineRule
from slosched.evaluate.metrics import Summary
from slosched.evaluate.plots import (
    decile_lines,
    fit_plot,
    goodput_bars,
    latency_cdfs,
    outcome_bars,
)
from slosched.evaluate.report import Section
from slosched.evaluate.timeline import timeline
from slosched.perfmodel import FitReport


def plot_fit(report: FitReport) -> Figure:
    """Held-out measurements only."""
    measured = report.held_out_measurements
    predicted = [report.model.predict(m.shape) for m in measured]
    return fit_plot(predicted, [m.seconds for m in measured])


def fit_section(report: FitReport) -> Section:
    """Coefficients, errors and the plot of a fit."""
    coefficients = pd.DataFrame(coefficient_rows(report), columns=["coefficient", "value"])
    errors = pd.DataFrame(error_rows(report), columns=list(ERROR_COLUMNS))
    text = (
        "T = C1(t+Bd) + C2·t2 + C3·t3 + C4·ceil((t+Bd)/64) + C5·[Bd>0] + C6·num_swap + C7, "
        "fitted to three quarters of the measured steps; errors in % of the measured time."
    )
    return Section("Latency model", [text, coefficients, errors, plot_fit(report)])


def comparison_section(
    heading: str, text: str, outcomes: Mapping[str, Outcome], rule: DeadlineRule
) -> Section:
    """The table and every figure of a comparison."""
    summaries = summarize_all(outcomes, rule)
    return Section(heading, [text, _frame(summaries), *figures(outcomes, rule).values()])


def figures(outcomes: Mapping[str, Outcome], rule: DeadlineRule) -> dict[str, Figure]:
    """By the name of the file that they are saved in."""
    summaries = summarize_all(outcomes, rule)
    records = {name: outcome.records for name, outcome in outcomes.items()}
    made = {
        "goodput": goodput_bars(summaries),
        "outcomes": outcome_bars(summaries),
        "latency": latency_cdfs(records),
        "by_prompt_length": decile_lines(records, rule),
    }
    for name, outcome in outcomes.items():
        if outcome.steps:
            made[f"timeline_{_file_name(name)}"] = timeline(outcome.steps)
    return made


def save_figures(folder: Path, made: Mapping[str, Figure]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in made.items():
        figure.savefig(folder / f"{name}.png", dpi=150)


def _frame(summaries: Mapping[str, Summary]) -> pd.DataFrame:
    rows = [dict(zip(COLUMNS, outcome_row(name, s), strict=True)) for name, s in summaries.items()]
    return pd.DataFrame(rows)


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in text)
