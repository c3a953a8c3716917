"""`slosched replay`: replay a trace against a running server or in the simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slosched.cli import options
from slosched.cli.console import console, progress_bar
from slosched.cli.fleet import FleetOptions
from slosched.cli.like import Entry, Like, note_settings, settings_of
from slosched.cli.live_capacity import check_not_simulated
from slosched.cli.local_model import ExtraMissingError
from slosched.cli.long_replay import LongOptions, open_long, replay_long
from slosched.cli.option_groups import grouped
from slosched.cli.outcome_table import outcome_table
from slosched.cli.promised import promised
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.cli.simulation import ReplicaOptions, simulate_contenders
from slosched.cli.trace_source import note_nothing_promised
from slosched.core import NO_SLO, DeadlineRule, RequestStatus
from slosched.evaluate.comparison import Outcome, all_gpu_s, summarize_all
from slosched.evaluate.perfetto import write_perfetto
from slosched.perfmodel import load_model
from slosched.replay.evaluations import FILE_NAME as EVALUATIONS
from slosched.replay.evaluations import write_evaluations
from slosched.replay.files import write_records
from slosched.workload import Trace

if TYPE_CHECKING:
    from slosched.metrics import RequestRecord

_MAX_TRACED = 100_000
"""The most steps and requests for which --out gets a Perfetto trace; more take many megabytes."""


@grouped
def replay(
    context: typer.Context,
    trace: options.TraceSource = "azure_conv",
    url: Annotated[
        str | None,
        typer.Option(
            callback=options.server_url,
            help="A running OpenAI-compatible server: http://127.0.0.1:8000.  Default: the "
            "simulator.",
        ),
    ] = None,
    api_key: options.ServerKey = None,
    policy: options.PolicyName = "goodput",
    like: Like = None,
    promise: options.TracePromiseOptions = options.TracePromiseOptions(),
    arrivals: options.TraceOptions = options.TraceOptions(),
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(),
    replica: ReplicaOptions = ReplicaOptions(),
    fleet: FleetOptions = FleetOptions(),
    long: LongOptions = LongOptions(),
    seed: options.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            file_okay=False,
            callback=options.writable,
            help="Folder for records.jsonl, report.html, figures, and trace.perfetto.json.gz "
            "unless it would be large: runs/live.",
        ),
    ] = None,
    figures: options.Figures = True,
    perfetto: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            callback=options.writable,
            metavar="FILE",
            help="Write every step and request as a trace for ui.perfetto.dev or chrome://tracing; "
            "compressed if the name ends in .gz: trace.json.gz.",
        ),
    ] = None,
) -> None:
    """Replay a trace and score it: requests are sent on time, however slow the answers.

    Examples:

    - against a server: `slosched replay --trace azure_conv -n 60 --rate 1 --url
      http://127.0.0.1:8000 --slo-ttft 1s --slo-tpot 100ms -o runs/live`
    - simulated: `slosched replay --trace AzureLLMInferenceTrace_conv.csv --rate 4 -p edf
      --slo-ttft 1s --slo-tpot 50ms`
    - simulated as vLLM ships, and then another policy in its place: `slosched replay --like vllm
      --latency-model h100/llama-3.1-8b --rate 10`, `slosched replay --like vllm -p goodput
      --latency-model h100/llama-3.1-8b --rate 10`
    - four simulated replicas, one of which fails for 20 s: `slosched replay --replicas 4 --router
      least_requests --fail 1@10s --startup 20s --rate 40 -n 2000 --latency-model
      h100/llama-3.1-8b`
    - agents, whose turns wait for each other, with a time for each whole session: `slosched replay
      --trace agents -n 400 --rate 1 --slo-ttft 2s --slo-tpot 50ms --slo-program 1x --prefix-cache
      hash --latency-model h100/llama-3.1-8b`

    - an hour of 100 replicas, 1.8 million requests, of which a row each is kept: `slosched replay
      --replicas 100 --summary --rate 500 --duration 1h -p fcfs --slo-ttft 1s --slo-tpot 50ms
      --latency-model h100/llama-3.1-8b -o runs/hour`

    With --url, the server has its own policy and limits; the options for these are for the
    simulator.  Clients wait for their answers until ten minutes after the last arrival, or
    disconnect after --client-timeout.  Ctrl-C and SIGTERM end a replay against a server early and
    keep what was measured.
    """
    long.check(url, perfetto)
    if perfetto is not None:
        _check_perfetto(perfetto, trace, out)
    if url is not None:
        check_not_simulated(context)
        # Only needed to promise multiples of the prefill time.
        model = None if replica.latency_model is None else load_model(replica.latency_model)
        requests = arrivals.open(trace, promise.rule(model, seed), seed)
        name = "the server"
        timeout_s = replica.client_timeout
        outcome = Outcome(_replay_until_ctrl_c(requests, url, seed, timeout_s, api_key))
        setting: dict[str, object] = {"client_timeout_s": timeout_s}
    else:
        entry = Entry(context, limits, kv, replica, fleet, seed)
        specs = [policy] if like is None or options.is_given(context, "policy") else []
        if len(fleet.routers) > 1:
            raise ValueError("replay takes one --router; `slosched compare` takes several")
        if len(fleet.scalers) > 1:
            raise ValueError("replay takes one --scaler; `slosched compare` takes several")
        entrant = entry.entrants(specs, entry.device(like), like)[-1]
        device, name = entrant.replica, entrant.name
        if long.summary:
            note_settings(settings_of([entrant]))
            columns = open_long(trace, promise, arrivals, device.model, seed)
            replay_long(columns, name, entrant.policy, device, long.jobs, out)
            return
        requests = arrivals.open(trace, promise.rule(device.model, seed), seed)
        settings = settings_of([entrant])
        note_settings(settings)
        done = simulate_contenders(requests, {name: (entrant.policy, device)})
        outcome = done.outcomes[name]
        setting = {"policy": entrant.spec, **settings, **device.provenance()}
    provenance: dict[str, object] = {
        "trace": requests.name,
        **requests.provenance,
        **setting,
    }
    rule = limits.deadline_rule
    is_whole = len(outcome.records) == len(requests)
    stopped = "" if is_whole else f"{len(outcome.records)} of "
    title = f"{stopped}{len(requests)} requests of {requests.name}, judged by {rule}"
    _show(title, name, outcome, rule)
    if out is not None:
        _leave(out, name, outcome, rule, title, provenance, draws=figures)
    if perfetto is not None:
        with console.status(f"tracing {len(outcome.steps)} steps"):
            write_perfetto(perfetto, outcome.records, outcome.steps, rule, provenance)
        console.print(f"wrote {perfetto}: open it at https://ui.perfetto.dev", markup=False)
    if not is_whole:
        raise typer.Exit(130)


def _check_perfetto(perfetto: Path, trace: str, out: Path | None) -> None:
    """Raise ValueError if --perfetto names the trace, or another file that the replay writes."""
    options.check_other_file(perfetto, Path(trace), "the trace", "--perfetto")
    if out is not None:
        for written in (out, out / "records.jsonl", out / "report.html"):
            options.check_two_files(perfetto, written, "--perfetto")


def _show(title: str, name: str, outcome: Outcome, rule: DeadlineRule) -> None:
    """Print the table, why requests were rejected or aborted, and a note if there were no SLOs."""
    outcomes = {name: outcome}
    console.print(outcome_table(title, summarize_all(outcomes, rule), gpu_s=all_gpu_s(outcomes)))
    if said := promised(record.slo for record in outcome.records):
        console.print(said)
    if num_relegated := sum(record.is_relegated for record in outcome.records):
        console.print(f"relegated: {num_relegated} served without their SLO")
    for status in (RequestStatus.REJECTED, RequestStatus.ABORTED):
        reasons = Counter(r.end_reason for r in outcome.records if r.status is status)
        if reasons:
            said = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
            console.print(f"{status}: {said}")
    if all(record.slo == NO_SLO for record in outcome.records):
        note_nothing_promised()


def _leave(
    out: Path,
    name: str,
    outcome: Outcome,
    rule: DeadlineRule,
    title: str,
    provenance: Mapping[str, object],
    *,
    draws: bool,
) -> None:
    """Write records, report, figures and the Perfetto trace of one replay to `out`.

    What an earlier replay left there and this one does not write is removed.
    """
    from slosched.cli.replay_report import leave_report  # slow to import

    trace = out / "trace.perfetto.json.gz"
    for path in (out / EVALUATIONS, trace):
        path.unlink(missing_ok=True)
    write_records(out / "records.jsonl", outcome.records, provenance)
    said = promised(record.slo for record in outcome.records)
    text = f"{title}. {said} Rejected and unfinished requests count as misses."
    heading = f"A replay of {name}"
    leave_report(out, heading, text, {name: outcome}, rule, provenance, draws=draws)
    wrote = "records.jsonl, report.html"
    wrote += ", and its figures as PNG and SVG" if draws else ""
    if outcome.evaluations is not None:
        write_evaluations(out, outcome.evaluations)
        said = f"why the portfolio chose what it chose: slosched explain {quote(str(out))}"
        console.print(said, markup=False)
    if len(outcome.steps) + len(outcome.records) <= _MAX_TRACED:
        write_perfetto(trace, outcome.records, outcome.steps, rule, provenance)
        wrote += ", and trace.perfetto.json.gz for https://ui.perfetto.dev"
    console.print(f"wrote {out}/{wrote}", markup=False)


class ReplayStopped(KeyboardInterrupt):
    """Ctrl-C or SIGTERM during a replay, with the records of the requests that had ended."""

    def __init__(self, records: list[RequestRecord]) -> None:
        super().__init__()
        self.records = records


def _replay_until_ctrl_c(
    trace: Trace, url: str, seed: int, client_timeout_s: float | None, api_key: str | None
) -> list[RequestRecord]:
    """Return the records of all requests, or after Ctrl-C or SIGTERM of those that had ended."""
    try:
        return replay_live(trace, url, seed, client_timeout_s, api_key)
    except ReplayStopped as stopped:
        if not stopped.records:
            raise
        console.print(
            f"[yellow]note:[/] stopped: {len(stopped.records)} of {len(trace)} requests "
            "had ended; those that were still being served or not yet sent are left out"
        )
        return stopped.records


def replay_live(
    trace: Trace,
    url: str,
    seed: int,
    client_timeout_s: float | None = None,
    api_key: str | None = None,
) -> list[RequestRecord]:
    """Replay against a server with a progress bar; print a note if the client sent anything late.

    Raise ReplayStopped on Ctrl-C or SIGTERM.
    """
    try:
        from slosched.replay.client import ReplayOptions  # aiohttp is an extra
        from slosched.replay.client import replay as replay_against
    except ImportError as error:
        raise ExtraMissingError(
            f"replaying against a server needs the serve extra ({error}): "
            "pip install 'slosched[serve]'"
        ) from error
    ended: list[RequestRecord] = []
    client = ReplayOptions(seed=seed, client_timeout_s=client_timeout_s, api_key=api_key)
    with progress_bar() as progress, sigterm_as_ctrl_c():
        task = progress.add_task(f"replaying against {url}", total=len(trace))

        def on_record(record: RequestRecord) -> None:
            ended.append(record)
            progress.advance(task)

        try:
            report = replay_against(trace, url, client, on_record=on_record)
        except KeyboardInterrupt:
            raise ReplayStopped(sorted(ended, key=lambda record: record.arrival_s)) from None
    if report.num_late_sends:
        console.print(
            f"[yellow]note:[/] the client sent {report.num_late_sends} requests late, by up to "
            f"{report.max_lateness_s * 1e3:.0f} ms; their times count from when they were due"
        )
    for description, count in report.errors.items():
        console.print(f"[yellow]note:[/] {count} x {escape(description)}")
    return report.records
