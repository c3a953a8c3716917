"""`slosched replay --summary`: hours of a large fleet, of which a row a request is kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from slosched.cli import options
from slosched.cli.console import console, progress_bar
from slosched.cli.outcome_table import rows_table
from slosched.cli.promised import promised
from slosched.cli.search_options import Jobs
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.cli.trace_source import is_kind, note_nothing_promised
from slosched.core import NO_SLO, SLO, LatencyModel, Policy
from slosched.evaluate.comparison import Replica
from slosched.fleet.setup import FleetSetup
from slosched.fleet.spec import make_router
from slosched.workload.long_trace import LongTrace
from slosched.workload.synthetic import FITTED_KINDS, INDEPENDENT_KINDS, synthesize_long


@dataclass(frozen=True)
class LongOptions:
    """The options for replays whose tokens have more times than fit into memory."""

    summary: Annotated[
        bool,
        typer.Option(
            "--summary",
            help="Keep only a row of each request, and play the --replicas one by one: for "
            "millions of requests.  The router must be one that looks at nothing, such as "
            "round_robin.  --out gets requests.npz.",
        ),
    ] = False
    jobs: Jobs = None

    def check(self, url: str | None, perfetto: Path | None) -> None:
        """Raise ValueError for options that do not fit together."""
        if not self.summary:
            if self.jobs is not None:
                raise ValueError("--jobs is for --summary, which plays replicas one by one")
            return
        if url is not None:
            raise ValueError("--summary is for the simulator; leave out --url")
        if perfetto is not None:
            raise ValueError("--perfetto shows every step, and --summary keeps none: choose one")


def replay_long(
    trace: LongTrace, name: str, policy: Policy, device: Replica, jobs: int | None, out: Path | None
) -> None:
    """Play the fleet of `device`, print how its requests fared, and leave a row of each in `out`.

    Raises ValueError if its replicas cannot be played one by one.
    """
    from slosched.evaluate.capacity.pool import local_pool
    from slosched.evaluate.long_fleets import play_long

    fleet = device.fleet
    if not isinstance(fleet, FleetSetup) or fleet.scaling or fleet.config.failures:
        raise ValueError(
            "--summary plays replicas one by one: give --replicas 100, without a scaler, failures "
            "and pools, in which replicas depend on each other"
        )
    with progress_bar() as progress, sigterm_as_ctrl_c():
        num_busy = min(len(fleet.replicas), len(trace))
        task = progress.add_task(f"simulating {name} on each replica", total=num_busy)
        rows = play_long(
            trace,
            policy,
            fleet.replicas,
            make_router(fleet.router),
            seed=device.config.seed,
            make_pool=local_pool(jobs),
            on_replica=lambda _index: progress.advance(task),
        )
    rule = device.config.limits.deadline_rule
    title = f"{len(trace):,} requests of {trace.name}, judged by {rule}"
    console.print(rows_table(title, name, rows, trace.rate))
    if said := promised([trace.slo]):
        console.print(said)
    if trace.slo == NO_SLO:
        note_nothing_promised()
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        columns = {"num_prompt_tokens": trace.num_prompt_tokens, **asdict(rows)}
        np.savez_compressed(out / "requests.npz", allow_pickle=False, **columns)
        console.print(f"wrote {out}/requests.npz: numpy.load reads its columns", markup=False)


def open_long(
    source: str,
    promise: options.TracePromiseOptions,
    arrivals: options.TraceOptions,
    model: LatencyModel,
    seed: int,
) -> LongTrace:
    """Return the trace as columns.

    A made-up one that only has a rate and a length is made as columns, and needs little memory.
    Any other is opened as always, and takes several hundred bytes a request until it is converted.
    """
    slo = promise.rule(model, seed)
    plain = options.TraceOptions(
        rate=arrivals.rate, num_requests=arrivals.num_requests, duration=arrivals.duration
    )
    is_made_up = source in (*FITTED_KINDS, *INDEPENDENT_KINDS) and is_kind(source)
    rate, size = arrivals.rate, arrivals.num_requests
    if rate and arrivals.duration:
        # Both are refused where the trace is opened.
        size = round(rate * arrivals.duration) if size is None else None
    one_slo = NO_SLO if slo is None else slo
    if is_made_up and arrivals == plain and rate and size and size > 1 and isinstance(one_slo, SLO):
        return synthesize_long(source, size, rate, seed, one_slo)
    return LongTrace.of(arrivals.open(source, slo, seed))
