"""The report of replays: their table, what a portfolio chose, all metrics, and the figures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from slosched.cli.outcome_table import columns, outcome_rows
from slosched.core import DeadlineRule
from slosched.evaluate.comparison import Outcome, all_gpu_s, summarize_all
from slosched.evaluate.report import Section, write_report
from slosched.metrics import summarize_steps
from slosched.policy.portfolio.explanation import explained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FIGURE = re.compile(
    r"(goodput|outcomes|latency|gaps|by_prompt_length|by_tier|replicas|timeline_.+)\.(png|svg)"
)
"""The files that `figures.figures` may draw."""


def leave_report(
    out: Path,
    title: str,
    text: str,
    outcomes: Mapping[str, Outcome],
    rule: DeadlineRule,
    provenance: Mapping[str, object],
    shares: Mapping[str, float] | None = None,
    *,
    draws: bool = True,
) -> None:
    """Write report.html and its figures, each as PNG and SVG, into the folder `out`.

    Unless it `draws`, the report has only text and tables.  The figures of an earlier report in the
    folder are removed.
    """
    _remove_figures(out)
    made: Mapping[str, Figure] = {}
    if draws:
        from slosched.cli.figures import figures, save_figures  # imports matplotlib

        made = figures(outcomes, rule)
        save_figures(out, made)
    frame = comparison_frame(outcomes, rule, shares)
    sections = [
        Section("Outcome", [text, frame, *made.values()]),
        *choices_sections(outcomes),
        metrics_section(outcomes, rule),
    ]
    write_report(out / "report.html", title, sections, provenance)


def _remove_figures(folder: Path) -> None:
    """Remove the figures of the report in a folder: those of the next may have other names."""
    if (folder / "report.html").exists():
        for path in folder.iterdir():
            if _FIGURE.fullmatch(path.name):
                path.unlink()


def comparison_section(
    heading: str,
    text: str,
    outcomes: Mapping[str, Outcome],
    rule: DeadlineRule,
    shares: Mapping[str, float] | None = None,
) -> Section:
    """Return a report section with the table and every figure of a comparison.

    `shares` says by policy which share of the bound on any scheduler it reached.
    """
    from slosched.cli.figures import figures  # imports matplotlib

    drawn = figures(outcomes, rule).values()
    return Section(heading, [text, comparison_frame(outcomes, rule, shares), *drawn])


def comparison_frame(
    outcomes: Mapping[str, Outcome], rule: DeadlineRule, shares: Mapping[str, float] | None
) -> pd.DataFrame:
    """Return the same table that the terminal shows, as a frame."""
    summaries, gpu_s = summarize_all(outcomes, rule), all_gpu_s(outcomes)
    names = [name.replace("\n", " ") for name in columns(summaries, shares, gpu_s)]
    return pd.DataFrame(outcome_rows(summaries, shares, gpu_s), columns=names)


def choices_sections(outcomes: Mapping[str, Outcome]) -> list[Section]:
    """Return a report section for each portfolio on what it chose and why."""
    return [
        Section(
            f"Choices of {name}",
            ["\n\n".join(" ".join(explained(each)) for each in outcome.evaluations)],
        )
        for name, outcome in outcomes.items()
        if outcome.evaluations
    ]


def metrics_section(outcomes: Mapping[str, Outcome], rule: DeadlineRule) -> Section:
    """Return a report section with a row for every metric and a column for every replay."""
    rows = {}
    for name, outcome in outcomes.items():
        rows[name] = outcome.summary(rule).as_row()
        if outcome.steps:
            rows[name] |= summarize_steps(outcome.steps).as_row()
        if outcome.leases:
            rows[name] |= {"gpu_s": outcome.gpu_s}
    table = pd.DataFrame(rows, dtype=object)
    table.index.name = "metric"
    text = (
        "Times end in _s, seconds, rates in _per_s. docs/glossary.md says what each is and where "
        "its definition comes from. Attainment is of offered requests unless it says otherwise."
    )
    return Section("All metrics", [text, table])
