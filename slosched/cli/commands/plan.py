"""`slosched plan`: the cheapest fleet that serves a trace in time, with an interval."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slosched.cli import options
from slosched.cli.console import console, progress_bar
from slosched.cli.gpu_offers import DEFAULT_MODEL_NAME, model_on
from slosched.cli.option_groups import grouped
from slosched.cli.search_options import Jobs, RayAddress, Seeds, pool_of, windows_of
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.cli.simulation import ReplicaOptions
from slosched.core import SloschedError
from slosched.fleet.routers import ROUTERS
from slosched.fleet.spec import make_router
from slosched.fleet.view import ReplicaKind
from slosched.policy.spec import make_policy
from slosched.workload import Trace

if TYPE_CHECKING:
    from slosched.cli.plan_report import PlanReport
    from slosched.evaluate.capacity import MakePool
    from slosched.evaluate.planning import Counts, Offer, Search, Trials

_DEFAULT_REQUESTS, _DEFAULT_WINDOW_S = 3000, 150.0
"""A window has that many requests, or the traffic of that time if it is more.

A fleet warms up in about twice the time of its longest answers, at any rate."""


class NoFleetError(SloschedError):
    """No fleet that may be bought keeps the promise."""


@grouped
def plan(
    context: typer.Context,
    gpu: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=PRICE",
            help="A GPU that can be had, and what it costs for an hour, in any currency: h100=2.5, "
            "or a latency model by its name or file, h100/llama-3.1-8b=2.5.  May be repeated.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="The model whose bundled latency model is meant by --gpu h100=2.5: llama-3.1-70b.",
        ),
    ] = DEFAULT_MODEL_NAME,
    trace: options.TraceSource = "azure_conv",
    promise: options.UsualPromiseOptions = options.UsualPromiseOptions(),
    arrivals: options.TraceOptions = options.TraceOptions(),
    policy: options.PolicyName = "goodput",
    router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:option=value,…]",
            help=f"What sends requests to the replicas: {', '.join(ROUTERS)}.  Default: "
            "least_requests, and cheapest_in_time where replicas are unequal.",
        ),
    ] = None,
    attainment: Annotated[
        float,
        typer.Option(
            parser=options.share,
            metavar="SHARE",
            help="Share of the offered requests that must be in time: 0.95.",
        ),
    ] = 0.99,
    max_replicas: Annotated[
        int, typer.Option(min=1, help="Most replicas of one kind that are tried: 16.")
    ] = 64,
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(),
    replica: ReplicaOptions = ReplicaOptions(),
    seeds: Seeds = 5,
    seed: options.Seed = 0,
    jobs: Jobs = None,
    ray: RayAddress = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document, and nothing else.")
    ] = False,
    out: options.OutDir = Path("runs/plan"),
) -> None:
    """Find the cheapest fleet that serves 99 % of all requests as promised, and the second best.

    Examples:

    - `slosched plan --trace azure_conv --rate 60 --slo-ttft 1s --slo-tpot 50ms --gpu h100=2.5
      --gpu l40s=0.9`
    - a larger model, of which a replica takes several GPUs: `slosched plan --model llama-3.1-70b
      --gpu h100=2.5 --gpu a100=1.4 --slo-ttft 2s --slo-tpot 100ms --rate 20`
    - from a trace of your own, for a script: `slosched plan --trace mine.csv --gpu h200=3.5
      --attainment 0.95 --json`

    Fleets of one kind and of two kinds are tried on the same requests, as few as the search needs:
    it takes for granted that more replicas serve no fewer requests in time, and tries one more
    replica than the cheapest fleet has.  Each fleet plays --seeds windows of 3000 requests, or of
    the traffic of 150 s if that is more, unless -n says how many.  A promise in prefill times is in
    those of the first --gpu.  After Ctrl-C or SIGTERM the same command goes on where it stopped.
    """
    if options.is_given(context, "latency_model"):
        raise ValueError("--latency-model is for one replica: name latency models with --gpu")
    make_policy(policy)
    if router is not None:
        make_router(router)
    rate = arrivals.rate
    if rate is not None and not rate > 0:
        raise ValueError(f"--rate must be a positive number of requests/s, not {rate}")
    make_pool = pool_of(jobs, ray)
    with _quiet(as_json):
        from slosched.evaluate.capacity import Store  # slow to import
        from slosched.evaluate.planning import Offer, Trials, priced

        offers: list[Offer] = []
        for name, price in map(priced, gpu):
            model_name = model_on(name, model)
            if model_name in [offer.model_name for offer in offers]:
                raise ValueError(f"--gpu {name}: {model_name} has a price already; give it once")
            one = replace(replica, latency_model=model_name).open(limits.limits(), kv, seed)
            offers.append(Offer(name, model_name, ReplicaKind(one.model, one.config), price))
        numbers = range(seed, seed + seeds)
        rate_to_play = rate if arrivals.thin_to is None else arrivals.thin_to
        size = max(_DEFAULT_REQUESTS, round(_DEFAULT_WINDOW_S * (rate_to_play or 0.0)))
        windows = windows_of(
            *(trace, arrivals, promise, offers[0].kind.model, numbers, size),
            keeps_slos=not promise.is_given(context),
            takes_rate=True,
        )
        offers, beyond = _within_reach(offers, windows, attainment)
        with Store(out / "points.sqlite") as store, sigterm_as_ctrl_c():
            trials = Trials(offers, windows, policy, router, rate_to_play, store)
            report = _report(trials, attainment, max_replicas, beyond, make_pool)
        report.show()
        facts: dict[str, object] = {
            "trace": windows[0].name,
            **windows[0].provenance,
            "policy": policy,
            "router": router or "least_requests, and cheapest_in_time for unequal replicas",
            **{f"price of {o.model_name}": f"{o.gpu_price:g} a GPU and hour" for o in offers},
            "seed": seed,
        }
        report.leave(out, facts)
        said = f"wrote {out}/report.html, its figure, plan.json, and fleets.csv"
        console.print(said, markup=False)
    if as_json:
        typer.echo(json.dumps(report.document(), indent=2))


@contextmanager
def _quiet(is_quiet: bool) -> Iterator[None]:
    """Let nothing be printed meanwhile, except for errors."""
    console.quiet = is_quiet
    try:
        yield
    finally:
        console.quiet = False


def _within_reach(
    offers: Sequence[Offer], windows: Sequence[Trace], target: float
) -> tuple[list[Offer], dict[str, str]]:
    """Return the offers that can keep the target at all, and by name why the others cannot.

    Raises NoFleetError if none can.
    """
    from slosched.evaluate.planning import reach_of

    kept, beyond = [], {}
    for offer in offers:
        reach = reach_of(offer.kind, windows)
        if reach.share >= target:
            kept.append(offer)
        else:
            beyond[offer.name] = reach.why(offer.name)
    if not kept:
        raise NoFleetError(
            f"{'; '.join(beyond.values())}.  Promise more time with --slo-ttft and --slo-tpot, or "
            "less with --attainment, or name a faster GPU"
        )
    return kept, beyond


def _report(
    trials: Trials,
    target: float,
    max_replicas: int,
    beyond: dict[str, str],
    make_pool: MakePool,
) -> PlanReport:
    """Search for the cheapest fleet.  Raises NoFleetError if none keeps the target."""
    from slosched.cli.plan_report import PlanReport, fleet_name
    from slosched.evaluate.capacity.pool import give
    from slosched.evaluate.planning import Search

    offers, windows = trials.offers, trials.windows
    rate = windows[0].rate if trials.rate is None else trials.rate
    names = [offer.name for offer in offers]
    with progress_bar() as progress, make_pool(partial(give, trials.bench)) as pool:
        task = progress.add_task("replays", total=None)

        def try_fleet(counts: Counts) -> float:
            total = (len(trials.judged) + 1) * len(windows)
            progress.update(task, description=f"trying {fleet_name(counts, names)}", total=total)
            return trials.play(counts, pool, lambda: progress.advance(task))

        prices = [offer.price for offer in offers]
        guesses = [offer.guess(windows[0], rate) for offer in offers]
        search = Search(prices, guesses, target, max_replicas, try_fleet)
        try:
            verdict = search.run()
        except KeyboardInterrupt:
            progress.stop()
            console.print("[yellow]note:[/] interrupted; run the same command again to go on")
            raise typer.Exit(130) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
    if verdict.best is None:
        raise NoFleetError(_no_fleet(trials, search, max_replicas))
    title = (
        f"{len(windows)} x {len(windows[0])} requests of {windows[0].name} at {rate:.4g}/s; "
        f"{len(trials.judged)} fleets were tried"
    )
    return PlanReport(title, search, trials, verdict, beyond)


def _no_fleet(trials: Trials, search: Search, max_replicas: int) -> str:
    from slosched.cli.plan_report import fleet_name

    best = max(trials.judged, key=lambda counts: trials.judged[counts].attainment)
    name = fleet_name(best, [offer.name for offer in trials.offers])
    return (
        f"no fleet of at most {max_replicas} replicas of a kind has {search.target:.4g} of the "
        f"requests in time: the best that was tried is {name}, with "
        f"{trials.judged[best].attainment:.2%}; raise --max-replicas, promise more time with "
        "--slo-ttft and --slo-tpot, or less with --attainment"
    )
