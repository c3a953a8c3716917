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
    FitReport,
    read_profile,
    save_model,
)
from slosched.perfmodel import fit as fit_model
from slosched.perfmodel.fit_report import (
    ERROR_COLUMNS,
    FORM_COLUMNS,
    PARAMETER_COLUMNS,
    choice,
    error_rows,
    form_rows,
    parameter_rows,
)
from slosched.perfmodel.swap import swap_cost


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
    console.print(swap_cost(report.model))
