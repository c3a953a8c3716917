"""`slosched capacity --url`: the capacity of a running server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slosched.cli import options
from slosched.cli.console import console, progress_bar
from slosched.cli.local_model import ExtraMissingError
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.core import DeadlineRule
from slosched.workload import Trace

if TYPE_CHECKING:
    from slosched.evaluate.capacity import Plan

LIVE_REQUESTS = 200
"""The default for each repeat: a trial takes this many divided by the rate."""
LIVE_PRECISION = 0.05
_NAME = "server"
_SIMULATED_ONLY = (
    *(
        "policy",
        "like",
        "tuned",
        "replicas",
        "prefill_replicas",
        "router",
        "shared_rates",
        "bound",
        "jobs",
        "ray",
    ),
)
"""Options that describe what is simulated, or how."""


@dataclass(frozen=True)
class LiveOptions:
    """The options for a search against a running server."""

    url: Annotated[
        str | None,
        typer.Option(
            callback=options.server_url,
            help="Measure a running OpenAI-compatible server: http://127.0.0.1:8000.  Each of "
            f"--seeds repeats has -n requests ({LIVE_REQUESTS} by default).  Default: the "
            "simulator.",
        ),
    ] = None
    api_key: options.ServerKey = None
    time_limit: Annotated[
        float,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="With --url: begin no trial that would end after this time: 2h.",
        ),
    ] = options.Seconds(1800)
    max_requests: Annotated[
        int,
        typer.Option(min=1, help="With --url: send no more requests than this in all trials."),
    ] = 20_000


def check_not_simulated(context: typer.Context) -> None:
    """Raise ValueError if an option is given that a running server has no use for."""
    for name in _SIMULATED_ONLY:
        if options.is_given(context, name):
            flag = f"--{name}".replace("_", "-")
            raise ValueError(
                f"{flag} is for the simulator: the server at --url has its own policy and "
                f"replicas; leave out {flag}"
            )


def measure_live(
    live: LiveOptions,
    windows: Sequence[Trace],
    plan: Plan,
    rule: DeadlineRule,
    client_timeout_s: float | None,
    out: Path,
) -> None:
    """Search the capacity of the server; print and write what `capacity` does of a simulation.

    Raises CapacityError if no rate was measured by all repeats.
    """
    url = live.url
    assert url is not None
    try:
        from slosched.evaluate.capacity.live import BY_CTRL_C, Effort, LiveSearch  # aiohttp
        from slosched.replay.client import ReplayOptions
    except ImportError as error:
        raise ExtraMissingError(
            f"measuring a server needs the serve extra ({error}): pip install 'slosched[serve]'"
        ) from error
    import pandas as pd  # slow to import

    from slosched.cli.capacity_report import leave_results, show
    from slosched.evaluate.capacity import CapacityError, Study

    effort = Effort(live.time_limit, live.max_requests)
    client = ReplayOptions(client_timeout_s=client_timeout_s, api_key=live.api_key)
    search = LiveSearch(_NAME, url, windows, plan, rule, effort, client)
    with progress_bar() as progress, sigterm_as_ctrl_c():
        task = progress.add_task(f"trials at {url}", total=None)
        search.run(lambda done, n: progress.update(task, completed=done, total=n))
    measured = {_NAME: search.measured}
    if search.why_stopped:
        console.print(f"[yellow]note:[/] stopped early: {escape(search.why_stopped)}")
    for description, count in search.errors.items():
        console.print(f"[yellow]note:[/] {count} x {escape(description)}")
    if not search.measured.complete:
        raise CapacityError(
            f"no rate was measured by all {len(windows)} repeats: give more --time-limit or "
            "--max-requests, or fewer --seeds or -n"
        )
    study = Study([search.measured], windows)
    title = f"{len(windows)} x {len(windows[0])} requests of {windows[0].name} on {url}"
    show(title, study, measured, plan.targets, {})
    out.mkdir(parents=True, exist_ok=True)
    trials = pd.DataFrame(search.trials)
    if (num_late := int(trials["num_late_sends"].sum())) > 0:
        console.print(
            f"[yellow]note:[/] this client sent {num_late} requests late, by up to "
            f"{1e3 * trials['max_lateness_s'].max():.0f} ms; their times count from when they were "
            "due"
        )
    provenance = {"server": url, "trace": windows[0].name, **windows[0].provenance}
    provenance |= {"deadline rule": rule, "stopped early": search.why_stopped or "no"}
    leave_results(out, title, study, measured, plan.targets, {}, trials, provenance)
    trials.to_csv(out / "trials.csv", index=False)
    console.print(f"wrote {out}/report.html, its figures, curves.csv, and trials.csv", markup=False)
    if search.why_stopped:
        raise typer.Exit(130 if search.why_stopped == BY_CTRL_C else 1)
