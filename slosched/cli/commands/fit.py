"""`slosched fit`: fit a latency model to a profile and print its error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slosched.cli import options
from slosched.cli.console import console, table
from slosched.cli.derivation_note import print_derivation
from slosched.perfmodel import (
    AUTO,
    FITTERS,
    LEARNT,
    ErrorReport,
    FitReport,
    LinearModel,
    Profile,
    read_profile,
    save_model,
)
from slosched.perfmodel import fit as fit_model
from slosched.perfmodel.derivation import with_derivation_error
from slosched.perfmodel.diagnosis import why_not_linear, why_not_seconds
from slosched.perfmodel.fit_report import (
    ERROR_COLUMNS,
    FORM_COLUMNS,
    PARAMETER_COLUMNS,
    choice,
    error_rows,
    form_rows,
    parameter_rows,
    server_said,
)
from slosched.perfmodel.graphs import with_graph_sizes
from slosched.perfmodel.swap import swap_cost


def fit(
    profile: Annotated[Path, typer.Argument(help="CSV file from `slosched profile`.")],
    out: Annotated[Path, options.out_file("JSON file for the fitted model.")] = Path("model.json"),
    form: Annotated[
        str,
        typer.Option(help=f"The form to fit: {', '.join((AUTO, *FITTERS, *LEARNT))}."),
    ] = AUTO,
    graph_sizes: Annotated[
        str | None,
        typer.Option(
            help="Numbers of tokens that CUDA graphs pad a step to: vllm (1, 2, 4, 8, 16, … 512), "
            "vllm:256 (the same up to 256, as with --max-num-seqs 128), a list (1,2,4,8), or none. "
            "decodes:1,2,4,8 are those of an engine that has graphs for decodes alone. "
            "Without it, what the profile says.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            callback=options.figure,
            help="Also plot held-out predictions and residuals by regime: fit.png, fit.svg.",
        ),
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Fit a latency model to a profile, and print its error on steps that were not fitted.

    The forms are:

    - `linear`: T = C1(t+Bd) + C2·t2 + C3·t3 + C4·⌈(t+Bd)/64⌉ + C5·[Bd>0] + C6·num_swap + C7, where
      t2 is the exact attention work of the chunks (in `linear-literal` the sum of chunk²)
    - `roofline`: the slower of reading the weights and multiplying the tokens
    - `profiled-separate` and `profiled-joint`: a table of the layers' times, plus prefill and
      decode attention whose times add up (separate) or not, as in FlashAttention-2 (joint)
    - `experts-separate` and `experts-joint`: the same for a mixture of experts, where a step reads
      the weights of the experts that its tokens touch. The profile has to say `num_experts` and
      `num_experts_per_token`
    - `auto`: fits all of them and takes the one with the least held-out error
    - `boosting`: gradient-boosted trees, for 250 recorded steps and more. Predictions take ten
      times as long as a scheduler allows, so it is only for simulations and reports

    With `--form linear`, the last line says if another form is clearly better, and why.

    Examples:

    - `slosched fit profile.csv -o model.json --plot fit.png`
    - `slosched fit profile.csv --form linear`
    - `slosched fit steps.csv --graph-sizes vllm`
    - `slosched fit steps.csv --form boosting`
    """
    measured = read_profile(profile)
    options.check_other_file(out, profile, "the profile")
    if plot is not None:
        options.check_other_file(plot, profile, "the profile", "--plot")
        options.check_two_files(plot, out, "--plot")
    if graph_sizes is not None:
        measured = with_graph_sizes(measured, graph_sizes, form)
    if (doubt := why_not_seconds(measured)) is not None:
        console.print(f"[yellow]note:[/] {escape(str(profile))}: {doubt}", soft_wrap=True)
    report = fit_model(measured, form, seed=seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_model(with_derivation_error(report.model), out)
    print_fit(report)
    if isinstance(report.model, LinearModel):
        better = why_not_linear(_considered(measured, report, seed), report.model.form)
        if better is not None:
            console.print(better)
    if plot is not None:
        from slosched.cli.figures import plot_fit, save_figure  # importing matplotlib takes seconds

        plot.parent.mkdir(parents=True, exist_ok=True)
        save_figure(plot_fit(report), plot, dpi=150)
        console.print(f"wrote {plot}", markup=False)
    console.print(f"wrote {out}", markup=False)


def _considered(profile: Profile, report: FitReport, seed: int) -> Mapping[str, ErrorReport | str]:
    """Return the held-out errors of all forms, fitting those that the report leaves out."""
    if len(report.considered) > 1:
        return report.considered
    return fit_model(profile, AUTO, seed=seed).considered


def print_fit(report: FitReport) -> None:
    if len(report.considered) > 1:
        console.print(table("Forms, held-out error in %", FORM_COLUMNS, form_rows(report)))
    console.print(table(f"The {report.model.form} form", PARAMETER_COLUMNS, parameter_rows(report)))
    console.print(table("Error in % of the measured time", ERROR_COLUMNS, error_rows(report)))
    console.print(choice(report))
    console.print(swap_cost(report.model))
    console.print(server_said(report.model))
    print_derivation(report.model.provenance)
