"""`slosched compare`: several policies on the same arrivals, side by side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slosched.cli import options
from slosched.cli.console import console, what
from slosched.cli.fleet import FleetOptions
from slosched.cli.like import (
    Entry,
    Like,
    common_replica,
    note_settings,
    settings_of,
)
from slosched.cli.option_groups import grouped
from slosched.cli.outcome_table import outcome_table
from slosched.cli.promised import promised
from slosched.cli.search_options import TunedFiles, check_no_tuned, loosest, loosest_fleet
from slosched.cli.simulation import ReplicaOptions, simulate_contenders
from slosched.cli.trace_source import described
from slosched.core import DeadlineRule
from slosched.evaluate.comparison import Comparison, Outcome, Replica, all_gpu_s, summarize_all
from slosched.fleet.view import ReplicaKind
from slosched.policy import POLICIES
from slosched.policy.spec import make_policy
from slosched.replay.benchmark_results import is_benchmark_result, read_benchmark_result
from slosched.replay.files import read_records
from slosched.workload import Trace

if TYPE_CHECKING:
    from slosched.evaluate.bounds import Bounds


@grouped
def compare(
    context: typer.Context,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="NAME[:option=value,…][+WRAPPER…]",
            help="A policy to simulate, such as edf:drop=expired, or like:vllm for an engine as it "
            "ships.  May be repeated.  Default: all policies.",
        ),
    ] = None,
    like: Like = None,
    trace: options.TraceSource = "azure_conv",
    promise: options.UsualPromiseOptions = options.UsualPromiseOptions(),
    arrivals: options.TraceOptions = options.TraceOptions(),
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(),
    replica: ReplicaOptions = ReplicaOptions(),
    fleet: FleetOptions = FleetOptions(),
    tuned: TunedFiles = None,
    records: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Add a recorded replay: live=runs/live/records.jsonl, or the result file of vllm "
            "bench serve --save-detailed or sglang.bench_serving --output-details, judged by "
            "--slo-ttft and --slo-tpot.  May be repeated.",
        ),
    ] = None,
    seed: options.Seed = 0,
    out: options.OutDir = Path("runs/compare"),
    figures: options.Figures = True,
) -> None:
    """Simulate policies on the same trace and device; write a table, figures and an HTML report.

    Examples:

    - `slosched compare -p fcfs -p slo_aware -p edf:drop=expired --trace azure_code --rate 2
      -n 500 --slo-ttft 1s --slo-tpot 50ms -o runs/code`
    - with engines as they ship, each under its own settings: `slosched compare -p like:vllm
      -p like:sglang -p goodput --latency-model h100/llama-3.1-8b --rate 20`
    - with vLLM as it ships, and `goodput` under vLLM's settings: `slosched compare --like vllm
      -p goodput --latency-model h100/llama-3.1-8b --rate 20`
    - on four replicas, each policy behind each router: `slosched compare -p fcfs -p goodput
      --replicas 4 --router round_robin --router least_requests --rate 60
      --latency-model h100/llama-3.1-8b`
    - on two to eight replicas, as a scaler decides while the trace is played: `slosched compare
      -p goodput --replicas 2..8 --scaler predicted --startup 60s --trace daily -n 20000 --rate 40
      --latency-model h100/llama-3.1-8b`
    - with the measurement of another server: `slosched compare -p fcfs --records
      vllm=result.json --slo-ttft 1s --slo-tpot 50ms`

    If a policy fails, or after Ctrl-C or SIGTERM, the results of the other policies are still
    written.
    """
    from slosched.evaluate.tuning import Tuned  # slow to import

    entry = Entry(context, limits, kv, replica, fleet, seed)
    device = entry.device(like)
    entrants = entry.entrants(policy or POLICIES, device, like)
    settings = settings_of(entrants)
    slo = promise.rule(device.model, seed)
    requests = arrivals.open(trace, slo, seed, keeps_slos=not promise.is_given(context))
    rule = limits.deadline_rule
    check_no_tuned(tuned, device)
    tunings = [Tuned.read(path) for path in tuned or ()]
    recorded = _read_all(
        records or (), promise, taken=[*(e.name for e in entrants), *(t.name for t in tunings)]
    )
    contenders = {entrant.name: (entrant.policy, entrant.replica) for entrant in entrants}
    for tuning in tunings:
        tuned_device = replace(device, config=tuning.on(device.config))
        contenders[tuning.name] = make_policy(tuning.policy), tuned_device
    note_settings(settings)
    simulated = simulate_contenders(requests, contenders)
    outcomes = simulated.outcomes | recorded
    _note_other_promises(outcomes, recorded)
    title = described(requests)
    bounds = _bounds(requests, [replica for _, replica in contenders.values()])
    shares = None if bounds.why_none_holds else _shares(outcomes, recorded, bounds, rule)
    gpu_s = all_gpu_s(outcomes)
    console.print(outcome_table(title, summarize_all(outcomes, rule), shares, gpu_s))
    said = promised(record.slo for outcome in outcomes.values() for record in outcome.records)
    if said:
        console.print(said)
    console.print(_about(bounds, device))
    for tuning in tunings:
        console.print(f"[yellow]note:[/] tuned: {escape(str(tuning))}")
    missing = _missing(simulated)
    for name, why in missing.items():
        console.print(f"[yellow]note:[/] {escape(f'{name} {why}')}")
    from slosched.cli.replay_report import leave_report  # slow to import

    text = (
        f"{title}, judged by the deadline rule {rule}, on a simulated "
        f"{device.model_name}. Every policy gets the same {_what_is_shared(settings)}; rejected "
        f"and unfinished requests count as misses. {said}\n\n{_about(bounds, device)}"
    )
    replica_facts = device if tunings else common_replica(entrants, device)
    provenance = {"trace": requests.name, **requests.provenance, **replica_facts.provenance()}
    provenance |= settings
    provenance |= {f"tuned {tuning.base}": str(tuning) for tuning in tunings}
    provenance |= missing
    heading = "Policies compared"
    leave_report(out, heading, text, outcomes, rule, provenance, shares, draws=figures)
    drawn = ", and its figures as PNG and SVG" if figures else ""
    console.print(f"wrote {out}/report.html{drawn}", markup=False)
    if not simulated.is_whole:
        raise typer.Exit(130 if simulated.stopped else 1)


def _what_is_shared(engines: Mapping[str, str]) -> str:
    if not engines:
        return "arrivals, lengths, KV cache and latency model"
    return "arrivals, lengths and latency model (an engine as it ships has its own KV cache)"


def _bounds(trace: Trace, replicas: Sequence[Replica]) -> Bounds:
    """Return what bounds every contender; all have the same devices, perhaps with other limits."""
    from slosched.evaluate.bounds import bounds_of, fleet_bounds  # slow to import

    fleets = [replica.fleet for replica in replicas if replica.fleet is not None]
    with console.status("bounding what any scheduler could do"):
        if fleets:
            return fleet_bounds(trace, loosest_fleet(fleets))
        kind = loosest([ReplicaKind(replica.model, replica.config) for replica in replicas])
        return bounds_of(trace, kind.model, kind.config)


def _shares(
    outcomes: Mapping[str, Outcome], recorded: Collection[str], bounds: Bounds, rule: DeadlineRule
) -> dict[str, float]:
    """Return by policy which share of the bound it reached.

    Recorded replays are left out, as they may be of another trace or device.
    """
    simulated = {name: outcome for name, outcome in outcomes.items() if name not in recorded}
    return {name: bounds.ratio(o.summary(rule).num_good) for name, o in simulated.items()}


def _about(bounds: Bounds, device: Replica) -> str:
    if bounds.why_none_holds:
        return f"No bound on every scheduler is given: {bounds.why_none_holds}."
    best = bounds.tightest
    return (
        f"No scheduler serves more than {best.num_good} of the {best.num_offered} requests well "
        f"on {'this device' if device.fleet is None else 'these replicas'} ({best.name} bound)."
    )


def _read_all(
    texts: Sequence[str], promise: options.UsualPromiseOptions, taken: Collection[str]
) -> dict[str, Outcome]:
    """Return the replays of `--records` by name.

    `promise` holds for benchmark results, whose files have no SLOs. Raise ValueError for a name
    that occurs twice or is in `taken`.
    """
    found: dict[str, Outcome] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ValueError(
                f"--records {text!r} is not NAME=FILE, as in live=runs/a/records.jsonl"
            )
        if name in taken or name in found:
            raise ValueError(f"--records {text!r}: the name {name!r} is taken; choose another")
        file = Path(path)
        if is_benchmark_result(file):
            replay = read_benchmark_result(file, promise.fixed())
        else:
            replay = read_records(file)
        found[name] = Outcome(replay.records)
    return found


def _missing(simulated: Comparison) -> dict[str, str]:
    """Return, for each policy that has no row in the table, why."""
    why = {name: f"was given up: {what(error)}" for name, error in simulated.failed.items()}
    return why | (
        {"stopped": "by Ctrl-C or SIGTERM: policies not yet done are left out"}
        if simulated.stopped
        else {}
    )


def _note_other_promises(outcomes: Mapping[str, Outcome], recorded: Collection[str]) -> None:
    """Print a note for recorded replays with other SLOs: their attainments do not compare."""
    promises = {name: {r.slo for r in outcome.records} for name, outcome in outcomes.items()}
    simulated = [promises[name] for name in outcomes if name not in recorded]
    for name in recorded:
        if promises[name] not in simulated[:1]:
            console.print(
                f"[yellow]note:[/] {escape(name)} has other SLOs than the simulated "
                "replays; each is judged by its own"
            )
