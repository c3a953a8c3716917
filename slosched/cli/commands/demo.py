"""`slosched demo`: all steps from profile to report, by the commands that a user would type."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.demo.agreement import compare_with_simulator
from slosched.cli.demo.load import Load, as_fast_as_now, choose_load
from slosched.cli.demo.server import running_server
from slosched.cli.demo.setup import (
    BASELINE,
    KV_TOKENS,
    LABELS,
    LENGTH_SCALE,
    LIMITS,
    MAX_CONTEXT_TOKENS,
    OURS,
    OVERLOAD,
    TARGET,
    DemoError,
    Files,
    quoted,
)
from slosched.cli.live_steps import LiveSteps
from slosched.perfmodel import load_model, save_model


def demo(
    out: options.OutDir = Path("runs/demo"),
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model, as for `serve`: smollm2-135m.")
    ] = "smollm2-135m",
    num_requests: Annotated[
        int,
        typer.Option("--num-requests", "-n", min=1, help="Number of requests in each live replay."),
    ] = 60,
    profile_time: Annotated[
        float,
        typer.Option(
            parser=options.duration, metavar="TIME", help="How long the model is profiled: 30s."
        ),
    ] = options.Seconds(60),
    threads: Annotated[int, typer.Option(min=1, help="CPU threads that torch uses.")] = 1,
    seed: options.Seed = 0,
) -> None:
    """Profile a real model here, fit, serve it, replay a trace live under three policies, compare.

    Every step prints the command that it runs, so that you can go on from there.  The output
    folder gets a report with plots.  It takes a few minutes on two cores, most of it for profiling
    and three live replays.

    Example: `slosched demo -n 30 --profile-time 30s -o runs/demo`.
    """
    demo_files = Files(out)
    out.mkdir(parents=True, exist_ok=True)
    _heading("1. Profile: how long do real batches take here?")
    _run(
        f"profile --model {quoted(model)} --threads {threads}"
        f" --time-limit {profile_time:g}s --batches 60"
        f" --max-num-batched-tokens {LIMITS.max_num_batched_tokens}"
        f" --max-num-seqs {LIMITS.max_num_seqs} --max-context-tokens {MAX_CONTEXT_TOKENS}"
        f" --kv-tokens {KV_TOKENS} --seed {seed} --overwrite -o {quoted(demo_files.profile)}"
    )
    _heading("2. Fit the latency model")
    profile, fitted, plot = map(quoted, (demo_files.profile, demo_files.model, demo_files.fit_plot))
    _run(f"fit {profile} -o {fitted} --plot {plot}")
    _heading(f"3. Serve it under {BASELINE}, and choose what to ask of it")
    with running_server(BASELINE, demo_files.model, model, threads, demo_files) as url:
        now = as_fast_as_now(load_model(demo_files.model), url, seed)
        save_model(now, demo_files.model_now)
        _make_trace(choose_load(now, num_requests, seed), num_requests, seed, demo_files)
        _heading(f"4. Replay the trace against it, open loop, then against {' and '.join(OURS)}")
        steps = {BASELINE: _replay(BASELINE, url, demo_files)}
    for policy in OURS:
        with running_server(policy, demo_files.model_now, model, threads, demo_files) as url:
            steps[policy] = _replay(policy, url, demo_files)
    _heading("5. The same trace through the simulator, under more policies")
    compare_with_simulator(demo_files, model, steps, seed)


def _make_trace(load: Load, num_requests: int, seed: int, files: Files) -> None:
    console.print(
        f"Promises for this machine: TTFT {load.slo.ttft_s:.2g} s, TPOT {load.slo.tpot_s:.2g} s.  "
        f"In the simulator {LABELS[BASELINE]} keeps {TARGET:.0%} of them up to "
        f"{load.capacity:.2g} requests/s; "
        f"offered are {OVERLOAD:g} times that, in the mix of Azure's conversation trace with "
        "every length divided by 8."
    )
    _run(
        f"trace make azure_conv -n {num_requests} --rate {load.rate:.3g} --seed {seed}"
        f" --length-scale {LENGTH_SCALE} --slo-ttft {load.slo.ttft_s:.2g}s"
        f" --slo-tpot {load.slo.tpot_s:.2g}s -o {quoted(files.trace)}"
    )


def _replay(policy: str, url: str, files: Files) -> LiveSteps:
    """Replay the trace against the server, and return the steps that it runs meanwhile."""
    steps = LiveSteps(url, files.steps(policy))
    _run(f"replay --trace {quoted(files.trace)} --url {url} -o {quoted(files.live(policy))}")
    return steps


def _heading(text: str) -> None:
    console.rule(f"[bold]{text}", align="left")


def _run(command: str) -> None:
    """Run one slosched command as a user would, with its output on this terminal."""
    console.print(f"[bold green]$[/] slosched {escape(command)}", soft_wrap=True)
    process = subprocess.run([sys.executable, "-m", "slosched", *shlex.split(command)], check=False)
    if process.returncode:
        raise DemoError(f"`slosched {command}` failed with exit status {process.returncode}")
