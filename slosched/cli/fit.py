"""`slosched fit`: a latency model from a profile, and how wrong it is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console, table
from slosched.perfmodel import AttentionWork, FitReport, fit_linear, read_profile, save_model


def fit(
    profile: Annotated[Path, typer.Argument(help="CSV file from `slosched profile`.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", dir_okay=False, help="The model, as JSON.")
    ] = Path("model.json"),
    attention: Annotated[
        AttentionWork,
        typer.Option(help="Prefill attention as exact work, or the literal sum of chunk²."),
    ] = AttentionWork.EXACT,
    held_out: Annotated[
        float, typer.Option(help="Share of the measurements that is never fitted, only judged.")
    ] = 0.25,
    plot: Annotated[
        Path | None, typer.Option(help="Figure of predicted against measured times (PNG, SVG).")
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Fit T = C1(t+Bd) + C2·t2 + C3·t3 + C4·⌈(t+Bd)/64⌉ + C5·[Bd>0] + C6·num_swap + C7.

    Example: `slosched fit profile.csv -o model.json --plot fit.png`.
    """
    report = fit_linear(
        read_profile(profile), attention=attention, held_out_fraction=held_out, seed=seed
    )
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
    console.print(table("Coefficients", ("coefficient", "value"), coefficient_rows(report)))
    console.print(table("Error in % of the measured time", ERROR_COLUMNS, error_rows(report)))


ERROR_COLUMNS = ("steps", "n", "mean", "p50", "p90", "p99", "under p95", "under p99")


def coefficient_rows(report: FitReport) -> list[tuple[str, str]]:
    """C1 … C7 in microseconds; those that no measurement depends on say so."""
    return [
        (
            f"C{i} {name.removesuffix('_s')}",
            "not determined" if name in report.undetermined else f"{1e6 * value:.6g} µs",
        )
        for i, (name, value) in enumerate(vars(report.model.coefficients).items(), start=1)
    ]


def error_rows(report: FitReport) -> list[tuple[str, ...]]:
    reports = {
        "fitted": report.train,
        "held out": report.held_out,
        **{f"held out, {regime}": error for regime, error in report.by_regime.items()},
    }
    return [
        (
            name,
            str(error.count),
            *(
                f"{percent:.1f}"
                for percent in (
                    error.mape,
                    error.p50,
                    error.p90,
                    error.p99,
                    error.under_p95,
                    error.under_p99,
                )
            ),
        )
        for name, error in reports.items()
    ]
