"""`slosched trace`: make traces and look at them."""

from __future__ import annotations

import math
from dataclasses import dataclass
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


@dataclass(frozen=True)
class BurstOptions:
    """What becomes of the bursts; after the options of every command that takes a trace."""

    thin_to: Annotated[
        float | None,
        typer.Option(help="Requests/s, by leaving out requests at random instead of --rate."),
    ] = None
    poisson: Annotated[
        bool, typer.Option("--poisson", help="Same requests and mean rate, Poisson arrivals.")
    ] = False

    def apply(self, trace: Trace, seed: int) -> Trace:
        if self.thin_to is not None:
            trace = trace.thinned_to(self.thin_to, seed)
        return trace.with_poisson_arrivals(seed=seed) if self.poisson else trace


@trace_app.command()
@grouped
def show(
    source: Source,
    arrivals: options.TraceOptions = options.TraceOptions(),
    bursts: BurstOptions = BurstOptions(),
    seed: options.Seed = 0,
) -> None:
    """Show size, rate, burstiness and lengths of a trace, and what was done to it.

    Examples: `slosched trace show AzureLLMInferenceTrace_conv.csv`,
    `slosched trace show azure_code -n 5000`.
    """
    print_summary(bursts.apply(arrivals.open(source, None, seed), seed))


@trace_app.command()
@grouped
def make(
    source: Source,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", dir_okay=False, help="File to write: .jsonl, or else CSV."),
    ],
    promise: options.PromiseOptions = options.PromiseOptions(),
    arrivals: options.TraceOptions = options.TraceOptions(),
    bursts: BurstOptions = BurstOptions(),
    seed: options.Seed = 0,
) -> None:
    """Write a trace: a synthetic one with the statistics of a public trace, or a file
    cut, scaled, clipped and given promises.

    Examples: `slosched trace make azure_conv -n 1000 --rate 4 --slo-ttft 1s -o t.csv`,
    `slosched trace make t.csv --poisson -o control.csv`.
    """
    trace = bursts.apply(arrivals.open(source, promise.slo(), seed), seed)
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
    origin = [(key, str(value)) for key, value in trace.provenance.items()]
    console.print(table("Where it comes from", ("note", "value"), origin))
