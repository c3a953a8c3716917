"""`slosched trace`: make traces, show their statistics, fetch public ones."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.commands.fetch import fetch
from slosched.cli.console import console, table
from slosched.cli.lazy import SUMMARIES
from slosched.cli.option_groups import grouped
from slosched.perfmodel import load_model
from slosched.workload import KINDS, Trace, write_trace

trace = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help=SUMMARIES["trace"],
)
trace.command()(fetch)

Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE|NAME|KIND",
        help="A trace file, a public trace that was fetched, or a kind to make up: "
        f"{', '.join(KINDS)}.",
    ),
]


@trace.command()
@grouped
def show(
    source: Source,
    arrivals: options.TraceOptions = options.TraceOptions(),
    seed: options.Seed = 0,
) -> None:
    """Show the size, rate, burstiness, lengths and prefix sharing of a trace, and its origin.

    Examples:

    - `slosched trace show AzureLLMInferenceTrace_conv.csv`
    - `slosched trace show azure_code -n 5000`
    - `slosched trace show azure_conv_2024 --start 34h --duration 1h`
    """
    print_summary(arrivals.open(source, None, seed))


@trace.command()
@grouped
def make(
    source: Source,
    out: Annotated[
        Path,
        options.out_file("File to write: .parquet or .jsonl; any other name is written as CSV."),
    ],
    promise: options.TracePromiseOptions = options.TracePromiseOptions(),
    latency_model: options.LatencyModelName = None,
    arrivals: options.TraceOptions = options.TraceOptions(),
    seed: options.Seed = 0,
) -> None:
    """Write a trace: a synthetic one like a public trace, or a changed copy of a file.

    A file can be cut, scaled, clipped and given SLOs.

    Examples:

    - `slosched trace make azure_conv -n 1000 --rate 4 --slo-ttft 1s -o t.csv`
    - `slosched trace make t.csv --poisson -o control.csv`
    - `slosched trace make sessions -n 5000 --slo-tier 0.7:1s/50ms --slo-tier 0.3:10s/200ms
      -o tiers.parquet`
    """
    options.check_other_file(out, Path(source), "the trace")
    model = None if latency_model is None else load_model(latency_model)
    trace = arrivals.open(source, promise.rule(model, seed), seed)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_trace(trace, out)
    print_summary(trace)
    console.print(f"wrote {out}", markup=False)


def print_summary(trace: Trace) -> None:
    rows = [
        (name, value if isinstance(value, str) else "-" if math.isnan(value) else f"{value:,.4g}")
        for name, value in trace.summary().items()
    ]
    console.print(table(f"Trace {trace.name}", ("statistic", "value"), rows))
    origin = [(key, str(value)) for key, value in trace.provenance.items()]
    if trace.prefix_block_tokens is not None:
        origin.append(("prefix_block_tokens", str(trace.prefix_block_tokens)))
    console.print(table("Where it comes from", ("note", "value"), origin))
