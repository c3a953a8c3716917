"""The figures and report sections of replays.  Imports matplotlib and pandas: load it late."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from slosched.cli.fit import (
    ERROR_COLUMNS,
    FORM_COLUMNS,
    PARAMETER_COLUMNS,
    choice,
    error_rows,
    form_rows,
    parameter_rows,
)
from slosched.cli.results import COLUMNS, Outcome, outcome_row, summarize_all
from slosched.core import DeadlineRule
from slosched.evaluate.metrics import Summary
from slosched.evaluate.plots import (
    decile_lines,
    fit_plot,
    goodput_bars,
    latency_cdfs,
    outcome_bars,
    timeline,
)
from slosched.evaluate.report import Section
from slosched.perfmodel import FitReport
from slosched.perfmodel.errors import groups


def plot_fit(report: FitReport) -> Figure:
    """Predictions for steps that were not fitted, by regime."""
    measured = report.held_out_measurements
    seconds = [m.seconds for m in measured]
    return fit_plot(report.held_out_predictions_s, seconds, groups(measured))


def fit_section(report: FitReport) -> Section:
    """Forms, parameters, errors and the plot of a fit."""
    forms = pd.DataFrame(form_rows(report), columns=list(FORM_COLUMNS))
    parameters = pd.DataFrame(parameter_rows(report), columns=list(PARAMETER_COLUMNS))
    errors = pd.DataFrame(error_rows(report), columns=list(ERROR_COLUMNS))
    text = f"{choice(report)}. Errors in % of the measured time, of steps that were not fitted."
    return Section("Latency model", [text, forms, parameters, errors, plot_fit(report)])


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
