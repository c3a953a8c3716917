"""`slosched capacity`: the highest rate that each policy serves well, with a 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slosched.cli import options
from slosched.cli.console import console, progress_bar, what
from slosched.cli.fleet import FleetOptions
from slosched.cli.inert_options import note_inert
from slosched.cli.like import (
    Entry,
    Like,
    common_replica,
    note_settings,
    settings_of,
)
from slosched.cli.live_capacity import (
    LIVE_PRECISION,
    LIVE_REQUESTS,
    LiveOptions,
    check_not_simulated,
    measure_live,
)
from slosched.cli.option_groups import grouped
from slosched.cli.search_options import (
    Jobs,
    Precision,
    RayAddress,
    Seeds,
    TunedFiles,
    check_no_tuned,
    loosest,
    loosest_fleet,
    pool_of,
    windows_of,
)
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.cli.simulation import ReplicaOptions
from slosched.fleet.view import ReplicaKind
from slosched.perfmodel import load_model

if TYPE_CHECKING:
    from slosched.evaluate.capacity import Contender, MakePool, Study, Sweep
    from slosched.workload import Trace

_DEFAULT_REQUESTS = 3000
"""The default for each seed.

It is long enough to warm up at 50 ms a token, and two policies take minutes on two cores.
"""


@grouped
def capacity(
    context: typer.Context,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            "-p",
            metavar="NAME[:option=value,…][+WRAPPER…]",
            help="A policy to measure, such as edf:drop=expired, or like:vllm for an engine as it "
            "ships; ratios are relative to the first.  May be repeated.  Default: sarathi and "
            "goodput.",
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
    live: LiveOptions = LiveOptions(),
    target: Annotated[
        list[float] | None,
        typer.Option(
            parser=options.share,
            metavar="SHARE",
            help="Share of offered requests that must be good: 0.95.  May be repeated.  Default: "
            "0.9 and 0.99.",
        ),
    ] = None,
    tuned: TunedFiles = None,
    precision: Precision = 0.02,
    max_rate: Annotated[
        float | None,
        typer.Option(
            help="Highest rate in requests/s that is tried: 50.  Default: far more than the device "
            "can serve."
        ),
    ] = None,
    shared_rates: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of rates at which every policy is simulated for the curves, from the "
            "lowest capacity to the highest.",
        ),
    ] = 5,
    seeds: Seeds = 5,
    seed: options.Seed = 0,
    bound: Annotated[
        bool, typer.Option(help="Whether to compute the capacity that no scheduler can exceed.")
    ] = True,
    jobs: Jobs = None,
    ray: RayAddress = None,
    out: options.OutDir = Path("runs/capacity"),
) -> None:
    """Find the highest rate at which a policy serves 90 % and 99 % of all requests as promised.

    Examples:

    - `slosched capacity -p sarathi -p slo_aware --trace azure_conv --slo-ttft 1s --slo-tpot 50ms
      --latency-model h100/llama-3.1-8b -o runs/capacity`
    - of four replicas, behind two routers: `slosched capacity --replicas 4 --router round_robin
      --router predicted_ttft -p fcfs -p goodput --latency-model h100/llama-3.1-8b`
    - with vLLM as it ships in the first place, and `goodput` under vLLM's settings: `slosched
      capacity --like vllm -p goodput --latency-model h100/llama-3.1-8b`

    - of a running server, which has its own policy: `slosched capacity --url
      http://127.0.0.1:8000 --slo-ttft 1s --slo-tpot 50ms -n 200 --seeds 3 --time-limit 30m`

    Every policy gets the same requests at the same rates, so the ratios are more certain than the
    capacities.  After Ctrl-C or SIGTERM the same command goes on where it stopped: finished replays
    are kept in the folder.
    """
    from slosched.cli.capacity_report import leave_results, show  # slow to import
    from slosched.evaluate.capacity import Contender, Plan, Store, Study, Sweep
    from slosched.evaluate.tuning import Tuned

    if max_rate is not None and not max_rate > 0:
        raise ValueError(f"--max-rate must be a positive number of requests/s, not {max_rate}")
    plan = Plan(
        tuple(sorted(target or (0.9, 0.99))),
        precision,
        max_rate=max_rate,
        num_shared_rates=shared_rates,
    )
    numbers = range(seed, seed + seeds)
    keeps_slos = not promise.is_given(context)
    if live.url is not None:
        check_not_simulated(context)
        model = None if replica.latency_model is None else load_model(replica.latency_model)
        windows = windows_of(
            trace, arrivals, promise, model, numbers, LIVE_REQUESTS, keeps_slos=keeps_slos
        )
        if not options.is_given(context, "precision"):
            plan = replace(plan, precision=LIVE_PRECISION)
        measure_live(live, windows, plan, limits.deadline_rule, replica.client_timeout, out)
        return
    make_pool = pool_of(jobs, ray)
    entry = Entry(context, limits, kv, replica, fleet, seed)
    device = entry.device(like)
    entrants = entry.entrants(policy or ("sarathi", "goodput"), device, like)
    settings = settings_of(entrants)
    contenders = [
        Contender(
            entrant.name,
            entrant.spec,
            entrant.replica.model,
            entrant.replica.model_name,
            entrant.replica.config,
            entrant.replica.fleet,
        )
        for entrant in entrants
    ]
    check_no_tuned(tuned, device)
    found = [Tuned.read(path) for path in tuned or ()]
    base = Contender("", "", device.model, device.model_name, device.config)
    contenders += [one.contender(base) for one in found]
    windows = windows_of(
        trace, arrivals, promise, device.model, numbers, _DEFAULT_REQUESTS, keeps_slos=keeps_slos
    )
    note_settings(settings)
    policies = {entrant.name: entrant.policy for entrant in entrants}
    note_inert(windows[0], policies, [entrant.replica for entrant in entrants])
    with Store(out / "points.sqlite") as store, sigterm_as_ctrl_c():
        sweep = Sweep(contenders, windows, plan, store)
        finished = _run(sweep, make_pool)
        if not any(measured.complete for measured in sweep.measured.values()):
            raise _nothing_measured(sweep)
        study = Study(list(sweep.measured.values()), windows)
        bounds: dict[float, float] = {}
        if bound and finished:
            try:
                bounds = _bounds(study, contenders, windows, plan.targets, make_pool)
            except KeyboardInterrupt:
                _note_interrupted()
                finished = False
        title = (
            f"{seeds} x {len(windows[0])} requests of {windows[0].name} on a simulated "
            f"{device.model_name}"
        )
        show(title, study, sweep.measured, plan.targets, bounds)
        facts = (device if found else common_replica(entrants, device)).provenance()
        provenance = {"trace": windows[0].name, **windows[0].provenance, **facts, **settings}
        provenance |= {f"tuned {one.base}": str(one) for one in found}
        for one in found:
            console.print(f"[yellow]note:[/] tuned: {escape(str(one))}")
        replays = store.frame()
        leave_results(out, title, study, sweep.measured, plan.targets, bounds, replays, provenance)
    console.print(
        f"wrote {out}/report.html, its figures, curves.csv, and all replays", markup=False
    )
    if not finished:
        raise typer.Exit(130)
    if any(measured.error for measured in sweep.measured.values()):
        raise typer.Exit(1)


def _bounds(
    study: Study,
    contenders: Sequence[Contender],
    windows: Sequence[Trace],
    targets: Sequence[float],
    make_pool: MakePool,
) -> dict[float, float]:
    """Return the bound on the capacity by target; none if no bound holds for these devices."""
    from slosched.evaluate.bounds import why_no_bound_holds, why_no_fleet_bound_holds
    from slosched.evaluate.capacity.bound import bound_windows

    fleets = [contender.fleet for contender in contenders if contender.fleet is not None]
    if fleets:
        fleet = loosest_fleet(fleets)
        replicas, why = fleet.replicas, why_no_fleet_bound_holds(windows[0], fleet)
    else:
        kind = loosest([ReplicaKind(one.model, one.config) for one in contenders])
        replicas, why = (kind,), why_no_bound_holds(windows[0], kind.config)
    if why:
        console.print(f"[yellow]note:[/] no bound on every scheduler is given: {why}")
        return {}
    best = max(study.capacity(name, targets[-1]).requests_per_s for name in study.contenders)
    with console.status("bounding what any scheduler could do (--no-bound leaves it out)"):
        guess = max(1.3 * best, windows[0].rate)
        found = bound_windows(windows, replicas, targets, guess, make_pool)
    # The requests of a short window can all wait for its end, however fast they come.
    none = [f"{100 * target:.4g} %" for target, rate in found.items() if math.isinf(rate)]
    if none:
        console.print(
            f"[yellow]note:[/] no rate is too high for {' or '.join(none)} of windows as short as "
            "these under such promises, so that there is no bound: give more requests with -n"
        )
    return {target: rate for target, rate in found.items() if math.isfinite(rate)}


def _run(sweep: Sweep, make_pool: MakePool) -> bool:
    """Run the searches; return False if Ctrl-C or SIGTERM ended them. Finished replays are kept."""
    with progress_bar() as progress:
        task = progress.add_task("replays", total=None)
        try:
            sweep.run(make_pool, lambda done, n: progress.update(task, completed=done, total=n))
        except KeyboardInterrupt:
            progress.stop()
            _note_interrupted()
            return False
    return True


def _note_interrupted() -> None:
    console.print("[yellow]note:[/] interrupted; run the same command again to go on")


def _nothing_measured(sweep: Sweep) -> Exception:
    """Return the exception to raise if no policy was simulated with all seeds at any rate."""
    errors = [f"{name}: {what(m.error)}" for name, m in sweep.measured.items() if m.error]
    if not errors:
        return typer.Exit(130)
    from slosched.evaluate.capacity import CapacityError

    return CapacityError(f"no policy could be measured; {'; '.join(errors)}")
