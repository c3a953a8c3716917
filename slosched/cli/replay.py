"""`slosched replay`: a trace against a running server, or through the simulator."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console, progress_bar
from slosched.cli.groups import grouped
from slosched.cli.local import ExtraMissingError
from slosched.cli.results import Outcome, outcome_table, summarize_all
from slosched.cli.simulation import ReplicaOptions, simulate_policies
from slosched.evaluate.records import write_records
from slosched.policy.spec import make_policy
from slosched.workload import Trace

if TYPE_CHECKING:
    from slosched.evaluate.metrics import RequestRecord


@grouped
def replay(
    trace: options.TraceSource = "azure_conv",
    url: Annotated[
        str | None,
        typer.Option(help="A running OpenAI-compatible server.  Without it: the simulator."),
    ] = None,
    policy: options.PolicyName = "slo_aware",
    promise: options.PromiseOptions = options.PromiseOptions(),
    arrivals: options.TraceOptions = options.TraceOptions(),
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(),
    replica: ReplicaOptions = ReplicaOptions(),
    seed: options.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", file_okay=False, help="Folder for records.jsonl and figures."),
    ] = None,
) -> None:
    """Replay a trace open loop and score it: requests arrive on time whatever became of others.

    Against a server: `slosched replay --trace azure_conv -n 60 --rate 1 --url
    http://127.0.0.1:8000 --slo-ttft 1s --slo-tpot 100ms`.  What the server's policy and limits
    are is the server's business; those options are for the simulator.

    Simulated: `slosched replay --trace AzureLLMInferenceTrace_conv.csv --rate 4 --policy edf
    --slo-ttft 1s --slo-tpot 50ms`.
    """
    requests = arrivals.open(trace, promise.slo(), seed)
    provenance: dict[str, object] = {"trace": requests.name, **requests.provenance}
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"--url {url!r} is no address of a server; write http://host:port")
        name = "the server"
        outcome = Outcome(replay_live(requests, url, seed))
    else:
        device = replica.open(limits.limits(), kv, seed)
        name = policy
        outcome = simulate_policies(requests, {name: make_policy(policy)}, device)[name]
        provenance |= {"policy": policy, **device.provenance()}
    rule = limits.deadline_rule
    title = f"{len(requests)} requests of {requests.name}, judged by {rule}"
    console.print(outcome_table(title, summarize_all({name: outcome}, rule)))
    if out is not None:
        from slosched.cli.figures import figures, save_figures  # matplotlib takes seconds to import

        write_records(out / "records.jsonl", outcome.records, provenance)
        save_figures(out, figures({name: outcome}, rule))
        console.print(f"wrote {out}/records.jsonl and figures")


def replay_live(trace: Trace, url: str, seed: int) -> list[RequestRecord]:
    """Against a server, with a progress bar; says what the client itself did late."""
    try:
        from slosched.engine.client import ReplayOptions  # aiohttp is an extra
        from slosched.engine.client import replay as replay_against
    except ImportError as error:
        raise ExtraMissingError(
            f"replaying against a server needs the serve extra ({error}): "
            "pip install 'slosched[serve]'"
        ) from error
    with progress_bar() as progress:
        task = progress.add_task(f"replaying against {url}", total=len(trace))
        report = replay_against(
            trace,
            url,
            ReplayOptions(seed=seed),
            on_record=lambda _: progress.advance(task),
        )
    if report.num_late_sends:
        console.print(
            f"[yellow]note:[/] the client sent {report.num_late_sends} requests late, by up to "
            f"{report.max_lateness_s * 1e3:.0f} ms; their times count from when they were due"
        )
    for description, count in report.errors.items():
        console.print(f"[yellow]note:[/] {count} x {description}")
    return report.records
