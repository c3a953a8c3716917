"""`slosched bounds`: what no policy can exceed on a trace."""

from __future__ import annotations

import math
from itertools import groupby
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console, table
from slosched.cli.inert_options import note_inert
from slosched.cli.option_groups import grouped
from slosched.cli.promised import promised_in
from slosched.cli.simulation import ReplicaOptions
from slosched.cli.trace_source import described
from slosched.evaluate.bounds import Bound, Pace, bounds_of, capacity_bound


@grouped
def bounds(
    context: typer.Context,
    trace: options.TraceSource = "azure_conv",
    promise: options.UsualPromiseOptions = options.UsualPromiseOptions(),
    arrivals: options.TraceOptions = options.TraceOptions(),
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(),
    replica: ReplicaOptions = ReplicaOptions(),
    hindsight: Annotated[
        bool,
        typer.Option(
            "--hindsight/--no-hindsight",
            help="Whether to compute the bound L3, which is usually the tightest and always the "
            "slowest: about 10 s for every 300 requests.",
        ),
    ] = True,
    capacity: Annotated[
        float | None,
        typer.Option(
            parser=options.share,
            metavar="SHARE",
            help="Also find the highest rate at which this attainment is possible: 0.99.",
        ),
    ] = None,
    seed: options.Seed = 0,
) -> None:
    """Print four upper bounds on how many requests of a trace any scheduler can serve well.

    Example: `slosched bounds --trace azure_code --rate 8 -n 300 --slo-ttft 1s --slo-tpot 50ms
    --latency-model h100/llama-3.1-8b --capacity 0.9`.
    """
    device = replica.open(limits.limits(), kv, seed)
    slo = promise.rule(device.model, seed)
    requests = arrivals.open(trace, slo, seed, keeps_slos=not promise.is_given(context))
    if capacity is not None:
        requests.own_rate()  # at other rates than its own the trace is bounded at the end
    note_inert(requests, {}, [device])
    with console.status("solving"):
        found = bounds_of(requests, device.model, device.config, hindsight=hindsight)
    columns = ("no policy serves more well", "good/s", "good", "steady load")
    console.print(table(described(requests), columns, [_row(bound) for bound in found.each]))
    if said := promised_in([requests]):
        console.print(said)
    console.print(f"tightest: {found.tightest.name}")
    for assumptions, alike in groupby(found.each, key=lambda bound: bound.assumptions):
        names = ", ".join(bound.name.partition(" ")[0] for bound in alike)
        console.print(f"{names}: {'; '.join(assumptions)}.", style="dim")
    unused = {
        "--max-loras": replica.max_loras,
        "--long-prefill-token-threshold": replica.long_prefill_token_threshold,
        "--watermark": replica.watermark,
    }
    if ignored := [option for option, value in unused.items() if value]:
        console.print(f"{', '.join(ignored)}: tightens no bound, they hold with and without.")
    if found.why_none_holds:
        console.print(f"For reference only: {found.why_none_holds}.")
    if capacity is not None:
        with console.status("searching the rate"):
            most = capacity_bound(requests, device.model, device.config, capacity)
            pace = Pace(requests, device.model, device.config.limits, device.config.kv_tokens)
            lasting = pace.capacity(capacity)
        console.print(
            f"{100 * capacity:.4g} % attainment is impossible {_above(most.rate)} ({most.name}), "
            f"and {_above(lasting)} if such requests never stopped coming (L5 pace)"
        )


def _row(bound: Bound) -> tuple[str, ...]:
    return (
        bound.name,
        _rate(bound.good_per_s),
        f"{bound.attainment:.1%}",
        _rate(bound.sustained_per_s),
    )


def _above(per_s: float) -> str:
    if per_s == 0:
        return "at any rate"
    return "above no known rate" if math.isinf(per_s) else f"above {_rate(per_s)} requests/s"


def _rate(per_s: float) -> str:
    return "-" if math.isnan(per_s) else f"{per_s:.3g}"
