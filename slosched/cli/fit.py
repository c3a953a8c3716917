"""`slosched fit`: a latency model from a profile, and how wrong it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console, table
from slosched.perfmodel import (
    AUTO,
    FITTERS,
    ErrorReport,
    FitReport,
    LinearModel,
    read_profile,
    save_model,
)
from slosched.perfmodel import fit as fit_model


def fit(
    profile: Annotated[Path, typer.Argument(help="CSV file from `slosched profile`.")],
    out: Annotated[Path, options.out_file("The model, as JSON.")] = Path("model.json"),
    form: Annotated[
        str,
        typer.Option(help=f"What is fitted: {', '.join((AUTO, *FITTERS))}."),
    ] = AUTO,
    plot: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            callback=options.writable,
            help="Figure of held-out predictions and residuals by regime (PNG, SVG).",
        ),
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Fit how long a step takes, and say how wrong the fit is on steps it has not seen.

    The forms: `linear`, T = C1(t+Bd) + C2·t2 + C3·t3 + C4·⌈(t+Bd)/64⌉ + C5·[Bd>0] + C6·num_swap +
    C7, with t2 as exact work (`linear-literal`: the sum of chunk²); `roofline`, weights read or
    tokens multiplied, whichever is slower; `profiled-separate` and `profiled-joint`, a table of
    the layers' time and attention kernels that add up or, as FlashAttention-2's, do not.  `auto`
    fits all of them and takes the one with the least held-out error.

    Examples:

    - `slosched fit profile.csv -o model.json --plot fit.png`
    - `slosched fit profile.csv --form linear`
    """
    report = fit_model(read_profile(profile), form, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(report.model, out)
    print_fit(report)
    if plot is not None:
        from slosched.cli.figures import plot_fit  # matplotlib takes seconds to import

        plot.parent.mkdir(parents=True, exist_ok=True)
        plot_fit(report).savefig(plot, dpi=150)
        console.print(f"wrote {plot}")
    console.print(f"wrote {out}")


def print_fit(report: FitReport) -> None:
    if len(report.considered) > 1:
        console.print(table("Forms, held-out error in %", FORM_COLUMNS, form_rows(report)))
    console.print(table(f"The {report.model.form} form", PARAMETER_COLUMNS, parameter_rows(report)))
    console.print(table("Error in % of the measured time", ERROR_COLUMNS, error_rows(report)))
    console.print(choice(report))


ERROR_COLUMNS = ("steps", "n", "mean", "p50", "p90", "p99", "max", "under p95", "under p99")
FORM_COLUMNS = ("form", *ERROR_COLUMNS[1:])
PARAMETER_COLUMNS = ("parameter", "value", "95 % interval")


def choice(report: FitReport) -> str:
    """Why this form, in a sentence or two."""
    error = report.held_out
    said = f"{report.model.form}: wrong by {error.mape:.1f} % on average, {error.p99:.1f} % at p99"
    if len(report.considered) == 1:
        return said
    return ". ".join(
        (
            f"{said}; the least held-out error of {len(form_rows(report))} forms, ties to the "
            "simplest",
            *(
                f"{form} was not fitted: {why}"
                for form, why in report.considered.items()
                if isinstance(why, str)
            ),
        )
    )


def form_rows(report: FitReport) -> list[tuple[str, ...]]:
    return [
        _error_row(name, error)
        for name, error in report.considered.items()
        if isinstance(error, ErrorReport)
    ]


def parameter_rows(report: FitReport) -> list[tuple[str, str, str]]:
    """Times in microseconds; what no measurement depends on says so."""
    is_linear = isinstance(report.model, LinearModel)
    rows = []
    for i, e in enumerate(report.estimates, start=1):
        name, unit, factor = e.name, "", 1.0
        if name.endswith("_s"):
            name, unit, factor = name.removesuffix("_s"), " µs", 1e6
        name = f"C{i} {name}" if is_linear else name
        interval = f"{factor * e.low:.3g} to {factor * e.high:.3g}{unit}"
        rows.append(
            (
                name.replace("_", " "),
                f"{factor * e.value:.4g}{unit}",
                interval if e.is_determined else "not determined by these measurements",
            )
        )
    return rows


def error_rows(report: FitReport) -> list[tuple[str, ...]]:
    off_grid = {"off the power-of-two grid": report.off_grid} if report.off_grid else {}
    reports = {
        "fitted": report.train,
        "held out": report.held_out,
        **{f"held out, {regime}": error for regime, error in report.by_regime.items()},
        **off_grid,
    }
    return [_error_row(name, error) for name, error in reports.items()]


def _error_row(name: str, error: ErrorReport) -> tuple[str, ...]:
    percents = (
        error.mape,
        error.p50,
        error.p90,
        error.p99,
        error.max,
        error.under_p95,
        error.under_p99,
    )
    return (name, str(error.count), *(f"{percent:.1f}" for percent in percents))
