"""`slosched profile`: measure real batches on the model and device at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.groups import grouped
from slosched.cli.local import open_local, run_profile


@grouped
def profile(
    out: Annotated[
        Path, typer.Option("--out", "-o", dir_okay=False, help="CSV file with one row a batch.")
    ] = Path("profile.csv"),
    model: options.ModelOptions = options.ModelOptions(),
    limits: options.LimitOptions = options.LimitOptions(
        max_num_batched_tokens=512, max_num_seqs=32
    ),
    kv: options.KVOptions = options.KVOptions(host_kv_tokens=4096),
    max_context_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest context in the plan.  Default: what model and KV cache hold."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs of each batch; the median counts.")
    ] = 3,
    num_random: Annotated[
        int, typer.Option(min=0, help="Random mixed batches beside the grid.")
    ] = 60,
    time_limit: Annotated[
        float,
        typer.Option(parser=options.duration, metavar="TIME", help="Stop measuring after this."),
    ] = 600.0,
    seed: options.Seed = 0,
) -> None:
    """Measure how long batches take: pure prefills, pure decodes, mixes and swaps.

    The batches come in random order and each is written as soon as it is measured, so a run that
    is interrupted or out of time is still a profile.

    Example: `slosched profile --model smollm2-135m --time-limit 2m -o profile.csv`, then
    `slosched fit profile.csv`.
    """
    local = open_local(model, kv, seed)
    measured = run_profile(
        local,
        limits.limits(),
        out,
        repeats=repeats,
        num_random=num_random,
        time_limit_s=time_limit,
        seed=seed,
        max_context_tokens=max_context_tokens,
    )
    console.print(f"wrote {len(measured.measurements)} measurements to {out}")
