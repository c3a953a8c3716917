"""`slosched profile`: measure real batches on the model and device at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.local import ModelOptions, open_local, run_profile
from slosched.core import Limits


def profile(
    out: Annotated[
        Path, typer.Option("--out", "-o", dir_okay=False, help="CSV file with one row a batch.")
    ] = Path("profile.csv"),
    model: options.ModelName = "smollm2-135m",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    load_format: options.LoadFormat = options.Format.AUTO,
    threads: options.Threads = None,
    max_num_batched_tokens: options.MaxTokens = 512,
    max_num_seqs: options.MaxSeqs = 32,
    max_context_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Longest context in the plan.  Default: what model and KV cache hold."
        ),
    ] = None,
    kv_tokens: options.KVTokens = None,
    host_kv_tokens: options.HostKVTokens = 4096,
    block_size: options.BlockSize = 16,
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
    local = open_local(
        ModelOptions(
            name=model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            threads=threads,
            kv_tokens=kv_tokens,
            host_kv_tokens=host_kv_tokens,
            block_size=block_size,
            seed=seed,
        )
    )
    measured = run_profile(
        local,
        Limits(max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs),
        out,
        repeats=repeats,
        num_random=num_random,
        time_limit_s=time_limit,
        seed=seed,
        max_context_tokens=max_context_tokens,
    )
    console.print(f"wrote {len(measured.measurements)} measurements to {out}")
