"""`slosched trace`: make traces and look at them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console, table
from slosched.cli.groups import grouped
from slosched.workload import KINDS, Trace, write_trace

trace_app = typer.Typer(
    no_args_is_help=True, help="Make a trace, or read one and show its statistics."
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE|KIND",
        help=f"A trace file, or a kind to synthesize: {', '.join(KINDS)}.",
    ),
]


@trace_app.command()
@grouped
def show(
    source: Source,
    arrivals: options.TraceOptions = options.TraceOptions(),
    seed: options.Seed = 0,
) -> None:
    """Show size, rate, burstiness and lengths of a trace.

    Examples: `slosched trace show AzureLLMInferenceTrace_conv.csv`,
    `slosched trace show azure_code -n 5000`.
    """
    print_summary(arrivals.open(source, None, seed))


@trace_app.command()
@grouped
def make(
    source: Source,
    out: Annotated[Path, typer.Option("--out", "-o", dir_okay=False, help="CSV file to write.")],
    promise: options.PromiseOptions = options.PromiseOptions(),
    arrivals: options.TraceOptions = options.TraceOptions(),
    seed: options.Seed = 0,
) -> None:
    """Write a trace as CSV: a synthetic one with the statistics of a public trace, or a file
    cut, scaled, clipped and given promises.

    Example: `slosched trace make azure_conv -n 1000 --rate 4 --slo-ttft 1s -o t.csv`.
    """
    trace = arrivals.open(source, promise.slo(), seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_trace(trace, out)
    print_summary(trace)
    console.print(f"wrote {out}")


def print_summary(trace: Trace) -> None:
    rows = [
        (name, value if isinstance(value, str) else "-" if math.isnan(value) else f"{value:,.4g}")
        for name, value in trace.summary().items()
    ]
    console.print(table(f"Trace {trace.name}", ("statistic", "value"), rows))
