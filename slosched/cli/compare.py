"""`slosched compare`: policies side by side on the same arrivals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.groups import grouped
from slosched.cli.results import Outcome, outcome_table, summarize_all
from slosched.cli.simulation import ReplicaOptions, simulate_policies
from slosched.evaluate.records import read_records
from slosched.policy import POLICIES
from slosched.policy.spec import make_policy


@grouped
def compare(
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="NAME[:option=value,…]",
            help="Repeat for each.  Default: all of them.",
        ),
    ] = None,
    trace: options.TraceSource = "azure_conv",
    promise: options.PromiseOptions = options.PromiseOptions(slo_ttft=1.0, slo_tpot=0.05),
    arrivals: options.TraceOptions = options.TraceOptions(),
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(),
    replica: ReplicaOptions = ReplicaOptions(),
    records: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Add a recorded replay (records.jsonl) to the comparison.  May be repeated.",
        ),
    ] = None,
    seed: options.Seed = 0,
    out: options.OutDir = Path("runs/compare"),
) -> None:
    """Simulate policies on the same trace and device; leave a table, figures and an HTML report.

    Example: `slosched compare -p fcfs -p slo_aware -p edf:drop=expired --trace azure_code
    --rate 2 -n 500 --slo-ttft 1s --slo-tpot 50ms -o runs/code`.
    """
    requests = arrivals.open(trace, promise.slo(), seed)
    device = replica.open(limits.limits(), kv, seed)
    rule = limits.deadline_rule
    policies = {spec: make_policy(spec) for spec in policy or POLICIES}
    recorded = _read_all(records or (), taken=policies)
    outcomes = simulate_policies(requests, policies, device) | recorded
    title = f"{len(requests)} requests of {requests.name} at {requests.rate:.3g}/s"
    console.print(outcome_table(title, summarize_all(outcomes, rule)))
    from slosched.cli.figures import comparison_section, figures, save_figures  # slow to import
    from slosched.evaluate.report import write_report

    text = (
        f"{title}, judged by the deadline rule {rule}, on a simulated "
        f"{device.model_name}. Every policy gets the same arrivals, lengths, KV cache and "
        "latency model; rejected and unfinished requests count as misses."
    )
    section = comparison_section("Comparison", text, outcomes, rule)
    provenance = {"trace": requests.name, **requests.provenance, **device.provenance()}
    write_report(out / "report.html", "Policies compared", [section], provenance)
    save_figures(out, figures(outcomes, rule))
    console.print(f"wrote {out}/report.html and figures")


def _read_all(texts: Sequence[str], taken: Collection[str]) -> dict[str, Outcome]:
    """The replays that `--records` names; no name twice, nor one of those `taken`."""
    found: dict[str, Outcome] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            raise ValueError(
                f"--records {text!r} is not NAME=FILE, as in live=runs/a/records.jsonl"
            )
        if name in taken or name in found:
            raise ValueError(f"--records {text!r}: the name {name!r} is taken; choose another")
        found[name] = Outcome(read_records(Path(path)).records)
    return found
