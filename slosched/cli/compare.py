"""`slosched compare`: policies side by side on the same arrivals."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console
from slosched.cli.results import Outcome, outcome_table, summarize_all
from slosched.cli.simulation import open_replica, simulate_policies
from slosched.core import DeadlineRule, PreemptionMode
from slosched.evaluate.records import read_records
from slosched.policy import POLICIES
from slosched.policy.spec import make_policy


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
    latency_model: options.LatencyModelName = None,
    rate: options.Rate = None,
    num_requests: options.NumRequests = None,
    slo_ttft: options.SomeTTFT = 1.0,
    slo_tpot: options.SomeTPOT = 0.05,
    length_scale: options.LengthScale = 1.0,
    max_prompt_tokens: options.MaxPrompt = None,
    max_output_tokens: options.MaxOutput = None,
    deadline_rule: options.Rule = DeadlineRule.MEAN_TPOT,
    preemption: options.Preemption = PreemptionMode.RECOMPUTE,
    max_num_batched_tokens: options.MaxTokens = 2048,
    max_num_seqs: options.MaxSeqs = 256,
    kv_tokens: options.KVTokens = None,
    host_kv_tokens: options.HostKVTokens = 0,
    block_size: options.BlockSize = 16,
    noise: options.Noise = 0.0,
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
    requests = options.open_trace(
        trace,
        num_requests=num_requests,
        rate=rate,
        seed=seed,
        slo=options.slo_from(slo_ttft, slo_tpot),
        length_scale=length_scale,
        max_prompt_tokens=max_prompt_tokens,
        max_output_tokens=max_output_tokens,
    )
    limits = options.make_limits(max_num_batched_tokens, max_num_seqs, preemption, deadline_rule)
    replica = open_replica(
        latency_model,
        limits,
        kv_tokens=kv_tokens,
        host_kv_tokens=host_kv_tokens,
        block_size=block_size,
        noise=noise,
        seed=seed,
    )
    policies = {spec: make_policy(spec) for spec in policy or POLICIES}
    recorded = _read_all(records or (), taken=policies)
    outcomes = simulate_policies(requests, policies, replica) | recorded
    title = f"{len(requests)} requests of {requests.name} at {requests.rate:.3g}/s"
    console.print(outcome_table(title, summarize_all(outcomes, deadline_rule)))
    from slosched.cli.figures import comparison_section, figures, save_figures  # slow to import
    from slosched.evaluate.report import write_report

    text = (
        f"{title}, judged by the deadline rule {deadline_rule}, on a simulated "
        f"{replica.model_name}. Every policy gets the same arrivals, lengths, KV cache and "
        "latency model; rejected and unfinished requests count as misses."
    )
    section = comparison_section("Comparison", text, outcomes, deadline_rule)
    provenance = {"trace": requests.name, **requests.provenance, **replica.provenance()}
    write_report(out / "report.html", "Policies compared", [section], provenance)
    save_figures(out, figures(outcomes, deadline_rule))
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
