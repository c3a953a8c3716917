"""`slosched shadow`: what a policy would have gained on recorded traffic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console, table
from slosched.cli.lazy import SUMMARIES
from slosched.cli.option_groups import grouped
from slosched.core import NO_SLO

if TYPE_CHECKING:
    from slosched.evaluate.shadow import ShadowReport
    from slosched.metrics import Summary
    from slosched.replay.shadow import ShadowRun
    from slosched.workload import Trace

shadow = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help=SUMMARIES["shadow"],
)


@shadow.callback()
def _group() -> None:
    """Keep `report` a command of its own, although there is no other yet."""


@shadow.command()
@grouped
def report(
    run: Annotated[
        Path,
        typer.Argument(help='The folder that a vLLM with `"shadow": true` names in its log.'),
    ],
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="NAME[:option=value,…][+WRAPPER…]",
            help="The policy to try.  Default: the one in the server's settings.",
        ),
    ] = None,
    promise: options.PromiseOptions = options.PromiseOptions(),
    load: Annotated[
        float,
        typer.Option(
            min=0.01, help="Play the arrivals so many times as fast: 1.5 for half as many more."
        ),
    ] = 1.0,
    seed: options.Seed = 0,
) -> None:
    """Fit a latency model to the recorded steps, and replay the recorded arrivals with it.

    They are replayed under vLLM's own scheduler and under the policy.  An SLO given here is that of
    the requests that were recorded without one.

    Examples:

    - `slosched shadow report slosched-shadow/2026-11-22T22-15-03`
    - `slosched shadow report slosched-shadow/2026-11-22T22-15-03 -p edf:drop=expired
      --slo-ttft 1s --slo-tpot 50ms --load 1.5`
    """
    from slosched.evaluate.shadow import judge  # slow to import
    from slosched.replay.shadow import read_shadow

    read = read_shadow(run)
    judged = judge(read, policy, slo=promise.slo() or NO_SLO, load=load, seed=seed)
    _print_run(read, judged)
    rows = [("replayed: vLLM", judged.theirs), (f"replayed: {judged.policy}", judged.ours)]
    if load == 1:
        rows.insert(0, ("recorded: vLLM", judged.measured))
    columns = ("", "good/s", "in time", "TTFT p99", "TPOT p99", "rejected")
    console.print(table("", columns, [_row(name, summary) for name, summary in rows]))
    console.print(_verdict(judged, load), markup=False, highlight=False)


def _print_run(run: ShadowRun, judged: ShadowReport) -> None:
    console.print(
        f"{_traffic(run.trace)}, {len(run.profile.measurements)} steps; "
        f"latency model: {judged.model.model.form}, "
        f"typical error {judged.model.held_out.p50:.1f} % (held out)",
        highlight=False,
    )
    if run.rejected:
        told = ", ".join(f"{n} {reason}" for reason, n in run.rejected.items())
        console.print(f"Asked beside vLLM, the policy would have rejected {told}.", highlight=False)


def _traffic(trace: Trace) -> str:
    """Return how many requests came how fast; requests that all come at one time have no rate."""
    number = f"{len(trace)} request{'s' if len(trace) > 1 else ''}"
    if math.isfinite(trace.rate):
        return f"{number} in {trace.duration_s:.0f} s ({trace.rate:.2g}/s)"
    return f"{number} at one time" if len(trace) > 1 else number


def _row(name: str, summary: Summary) -> tuple[str, ...]:
    return (
        name,
        _rate(summary.good_requests_per_s),
        f"{summary.attainment:.1%}",
        _seconds(summary.ttft_s.p99),
        _seconds(summary.tpot_s.p99),
        f"{summary.num_rejected / summary.num_offered:.1%}",
    )


def _rate(per_s: float) -> str:
    return "–" if math.isnan(per_s) else f"{per_s:.3g}"


def _seconds(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.3g} s"


def _verdict(judged: ShadowReport, load: float) -> str:
    """Return the report's one sentence."""
    traffic = "On your traffic" if load == 1 else f"On your traffic, {load:g} times as fast,"
    if judged.gain is None:
        return (
            f"{traffic} vLLM would have served no request in time, "
            f"{judged.policy} {judged.ours.num_good}."
        )
    share, interval = judged.gain
    served = f"{traffic} {judged.policy} would have served {share:+.1%} good requests"
    if interval is None:
        return (
            f"{served} compared with vLLM's own scheduler; how sure that is cannot be told from "
            "requests that all came at one time."
        )
    low, high = interval
    return f"{served} [{low:+.1%}, {high:+.1%}] compared with vLLM's own scheduler."
