"""`slosched profile`: measure how long real batches take on a model and device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.bundled_models import ShowBundled
from slosched.cli.commands.record import HEEDED_BY_RECORD, RecordUrl, record_to
from slosched.cli.composed_profile import HEEDED_BY_FROM, ComposedRun, SourceOptions
from slosched.cli.console import console
from slosched.cli.local_model import open_local, runs_on_cpu
from slosched.cli.option_groups import grouped
from slosched.cli.profile_run import ProfileRun, begun_profile, run_profile, summary
from slosched.cli.profile_server import profile_server
from slosched.cli.vllm import Engine, EngineName, Words, check_vllm, open_vllm, split


@grouped
def profile(
    context: typer.Context,
    out: Annotated[Path, options.out_file("CSV file with a row for each measured step.")] = Path(
        "profile.csv"
    ),
    model: options.ModelOptions = options.ModelOptions(),
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(host_kv_tokens=4096),
    max_context_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest context in the plan, in tokens: 4096.  Default: what model and KV cache "
            "allow.",
        ),
    ] = None,
    batches: Annotated[
        int,
        typer.Option(
            min=1, help="Number of batches in the plan; each is measured in several passes."
        ),
    ] = 120,
    passes: Annotated[
        int,
        typer.Option(
            min=1, help="Most passes over the plan; batches with stable times need only three."
        ),
    ] = 7,
    time_limit: Annotated[
        float,
        typer.Option(
            parser=options.duration, metavar="TIME", help="Stop measuring after this time: 2m."
        ),
    ] = options.Seconds(600),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew even if the file exists.")
    ] = False,
    server: Annotated[
        bool,
        typer.Option(
            "--server/--no-server",
            help="Whether to measure what the HTTP server adds to a request and to a step, in some "
            "seconds at the end.",
        ),
    ] = True,
    source: SourceOptions = SourceOptions(),
    record: RecordUrl = None,
    api_key: options.ServerKey = None,
    engine: EngineName = Engine.TORCH,
    words: Words = None,
    seed: options.Seed = 0,
    _list: ShowBundled = False,
) -> None:
    """Measure how long batches take: pure prefills, pure decodes, mixes and swaps.

    The plan covers every regime with few batches. It is measured in passes, until the median time
    of each batch is known to 2 %.  Every step is written as soon as it is measured: a run that is
    interrupted or out of time leaves a valid profile, and the same command continues it.  At the
    end, a server is started on this machine to measure what it adds to the steps.

    Examples:

    - this device: `slosched profile --model smollm2-135m --time-limit 2m -o profile.csv`, then
      `slosched fit profile.csv`
    - a GPU that you do not have: `slosched profile --from aiconfigurator --gpu h200 --model
      openai/gpt-oss-120b --tp 2 -o h200.csv`
    - the traffic of a running server: `slosched profile --record http://127.0.0.1:8000
      --time-limit 60s -o traffic.csv`
    - the steps of vLLM, with vLLM's own options after `--`: `slosched profile --engine vllm
      meta-llama/Llama-3.1-8B --max-num-batched-tokens 8192 --max-num-seqs 256 -o vllm.csv --
      --tensor-parallel-size 2`
    """
    if record is not None:
        options.check_heeded(context, "--record", HEEDED_BY_RECORD)
        record_to(out, record, time_limit, overwrite, api_key)
        return
    name, rest = split(words, engine, model.model)
    if source.origin is not None:
        options.check_heeded(context, "--from", HEEDED_BY_FROM)
        source.compose(name, out, ComposedRun.of(context, limits, seed, overwrite))
        return
    limits = limits.on(context, is_cpu=runs_on_cpu(model))
    run = ProfileRun(batches, passes, time_limit, max_context_tokens, seed, overwrite)
    if engine is Engine.VLLM:
        check_vllm(context, force=True)
        theirs = open_vllm(context, model, name, limits.limits(), kv, rest)
        measured = run_profile(theirs, limits.limits(), out, run)
        console.print(f"wrote {out}: {summary(measured, theirs.block_bytes)}", markup=False)
        return
    begun = None if overwrite else begun_profile(out)
    if begun is not None:
        model = model.as_measured(begun.provenance)
    local = open_local(replace(model, model=name), kv, limits.limits(), seed)
    measured = run_profile(local, limits.limits(), out, run)
    console.print(f"wrote {out}: {summary(measured, local.block_bytes)}", markup=False)
    if server:
        profile_server(local, out)
