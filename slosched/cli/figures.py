"""The figures of replays and of fits, and the report sections that show them.

Imports matplotlib and pandas, so other modules import it only when they need it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from zlib import crc32

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from slosched.core import DeadlineRule
from slosched.evaluate.comparison import Outcome, summarize_all
from slosched.evaluate.plots import (
    MAX_TIERS,
    decile_lines,
    fit_plot,
    folded,
    gap_tails,
    goodput_bars,
    latency_cdfs,
    outcome_bars,
    promised,
    replicas_over_time,
    tier_bars,
    timeline,
)
from slosched.evaluate.report import Section
from slosched.perfmodel import FitReport
from slosched.perfmodel.errors import groups
from slosched.perfmodel.fit_report import (
    ERROR_COLUMNS,
    FORM_COLUMNS,
    PARAMETER_COLUMNS,
    choice,
    error_rows,
    form_rows,
    parameter_rows,
)

_LONGEST_NAME = 150
_UNDATED = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def plot_fit(report: FitReport) -> Figure:
    """Return a plot of the predictions for held-out steps, by regime."""
    measured = report.held_out_measurements
    seconds = [m.seconds for m in measured]
    return fit_plot(report.held_out_predictions_s, seconds, groups(measured))


def fit_section(report: FitReport) -> Section:
    """Return a report section with the forms, parameters, errors and plot of a fit."""
    forms = pd.DataFrame(form_rows(report), columns=list(FORM_COLUMNS))
    parameters = pd.DataFrame(parameter_rows(report), columns=list(PARAMETER_COLUMNS))
    errors = pd.DataFrame(error_rows(report), columns=list(ERROR_COLUMNS))
    text = f"{choice(report)}. Errors in % of the measured time, of steps that were not fitted."
    return Section("Latency model", [text, forms, parameters, errors, plot_fit(report)])


def figures(outcomes: Mapping[str, Outcome], rule: DeadlineRule) -> dict[str, Figure]:
    """Return every figure of the replays, by the file name (without suffix) to save it under."""
    outcomes = {_drawn(name): outcome for name, outcome in outcomes.items()}
    summaries = summarize_all(outcomes, rule)
    records = {name: outcome.records for name, outcome in outcomes.items()}
    made = {
        "goodput": goodput_bars(summaries),
        "outcomes": outcome_bars(summaries),
        "latency": latency_cdfs(records),
        "gaps": gap_tails(records),
        "by_prompt_length": decile_lines(records, rule),
    }
    if 1 < max(len(promised({name: replay})) for name, replay in records.items()) <= MAX_TIERS:
        made["by_tier"] = tier_bars(records, rule)
    leases = {name: outcome.leases for name, outcome in outcomes.items() if outcome.leases}
    if leases:
        made["replicas"] = replicas_over_time(leases, records)
    for name, outcome in outcomes.items():
        if outcome.steps:
            taken_over = [e for e in outcome.evaluations or () if e.chosen != e.before]
            changes = [(e.counted_s, e.chosen) for e in taken_over]
            figure = timeline(outcome.steps, outcome.records, rule, changes)
            figure.suptitle(folded(name, 90), fontsize=10)
            made[f"timeline_{_file_name(name.strip())}"] = figure
    return made


def _drawn(name: str) -> str:
    """Return the name so that matplotlib draws all of it.

    Dollars would enclose a formula, and a legend leaves out what begins with an underscore.
    """
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


def save_figures(folder: Path, made: Mapping[str, Figure]) -> None:
    """Save each figure in `folder`, as PNG for slides and as SVG for print."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in made.items():
        save_figure(figure, folder / f"{name}.png", dpi=200)
        figure.set_layout_engine(None)  # already laid out; drawing takes half as long without
        save_figure(figure, folder / f"{name}.svg")


def save_figure(figure: Figure, path: Path, dpi: float | str = "figure") -> None:
    """Save the figure, without the date and the random names that would change its bytes."""
    with mpl.rc_context({"svg.hashsalt": "slosched"}):
        figure.savefig(path, dpi=dpi, metadata=_UNDATED.get(path.suffix))


def _file_name(text: str) -> str:
    """Return a name of at most `_LONGEST_NAME` characters; a cut one differs for each text."""
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in text)
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[: _LONGEST_NAME - 9]}_{crc32(text.encode()):08x}"
