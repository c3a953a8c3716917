"""`slosched tune`: find a policy's best hyper-parameters, and judge them on other requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slosched.cli import options
from slosched.cli.console import console, progress_bar, table
from slosched.cli.inert_options import note_inert
from slosched.cli.option_groups import grouped
from slosched.cli.promised import promised_in
from slosched.cli.search_options import Jobs, Precision, RayAddress, pool_of, windows_of
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.cli.simulation import ReplicaOptions
from slosched.policy.spec import make_policy

if TYPE_CHECKING:
    from slosched.evaluate.capacity import MakePool
    from slosched.evaluate.tuning import Tuned, Tuner

_DEFAULT_REQUESTS = 1400
"""The default for each seed: five windows of `capacity` leave room for three of these in Azure's
conversation trace.
"""
_MAX_ROWS = 12


@grouped
def tune(
    context: typer.Context,
    policy: options.PolicyName = "sarathi",
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,…",
            help="Values to try for a hyper-parameter, max_num_batched_tokens or max_num_seqs: "
            "token_budget=256,512.  May be repeated.  Default: the values that the policy "
            "declares.",
        ),
    ] = None,
    target: Annotated[
        float,
        typer.Option(
            parser=options.share,
            metavar="SHARE",
            help="Tune for the capacity at this share of good requests: 0.9.",
        ),
    ] = 0.99,
    at_rate: Annotated[
        float | None, typer.Option(help="Tune for good requests/s at this offered rate instead: 4.")
    ] = None,
    trace: options.TraceSource = "azure_conv",
    promise: options.UsualPromiseOptions = options.UsualPromiseOptions(),
    arrivals: options.TraceOptions = options.TraceOptions(),
    limits: options.LimitOptions = options.LimitOptions(),
    kv: options.KVOptions = options.KVOptions(),
    replica: ReplicaOptions = ReplicaOptions(),
    precision: Precision = 0.03,
    seeds: Annotated[
        int,
        typer.Option(min=1, help="Number of windows to tune on, and of other windows to judge on."),
    ] = 3,
    seed: options.Seed = 0,
    jobs: Jobs = None,
    ray: RayAddress = None,
    out: options.OutDir = Path("runs/tune"),
) -> None:
    """Find a policy's best hyper-parameters, so that it is compared at its best.

    Examples:

    - `slosched tune -p sarathi --grid token_budget=256,512,1024 --trace azure_conv --slo-ttft 1s
      --slo-tpot 50ms --latency-model h100/llama-3.1-8b -o runs/tune`
    - then `slosched capacity --tuned runs/tune/tuned.json`

    The policy is tuned on the end of the trace (or on made-up traces of other seeds) and judged on
    the beginning, the part that `capacity` uses.  After Ctrl-C or SIGTERM the same command goes on
    where it stopped: finished replays are kept in the folder.
    """
    from slosched.cli.capacity_report import capacity_table, notes  # slow to import
    from slosched.evaluate.capacity import Contender, Plan, Store
    from slosched.evaluate.tuning import Objective, Tuner, judge, values_of

    objective = Objective(target, at_rate)
    values = values_of(policy, _grid(grid or ()))
    make_pool = pool_of(jobs, ray)
    device = replica.open(limits.limits(), kv, seed)
    base = Contender(policy, policy, device.model, device.model_name, device.config)
    numbers = [*range(seed, seed + seeds), *range(-1 - seed, -1 - seed - seeds, -1)]
    keeps_slos = not promise.is_given(context)
    windows = windows_of(
        trace, arrivals, promise, device.model, numbers, _DEFAULT_REQUESTS, keeps_slos=keeps_slos
    )
    note_inert(windows[0], {policy: make_policy(policy)}, [device])
    with Store(out / "points.sqlite") as store, sigterm_as_ctrl_c():
        tuner = Tuner(base, values, windows[seeds:], objective, precision=precision, store=store)
        try:
            found = _run(tuner, make_pool, sum(map(len, values.values())))
            found.write(out / "tuned.json")
            console.print(_trials(found))
            with console.status("judging on windows that it was not tuned on"):
                plan = Plan((target,), precision)
                study = judge(base, found, windows[:seeds], plan, make_pool, store)
        except KeyboardInterrupt:
            console.print("[yellow]note:[/] interrupted; run the same command again to go on")
            raise typer.Exit(130) from None
    title = f"{100 * target:.4g} % good, on requests that it was not tuned on"
    console.print(capacity_table(title, study, target, {}))
    if said := promised_in(windows):
        console.print(said)
    for note in notes(study, {}, (target,)):
        console.print(f"[yellow]note:[/] {escape(note)}")
    console.print(f"best: {found}", markup=False)
    said = f"wrote {out}/tuned.json, for `--tuned` of `slosched capacity` and `compare`"
    console.print(said, markup=False)


def _grid(texts: list[str] | tuple[()]) -> dict[str, list[str]]:
    """Return the values to try by name; raise ValueError for a text that is not NAME=VALUE,…"""
    found: dict[str, list[str]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        chosen = [value.strip() for value in values.split(",") if value.strip()]
        if not name or not chosen:
            raise ValueError(f"--grid {text!r} is not NAME=VALUE,…, as in token_budget=256,512")
        found[name.strip()] = chosen
    return found


def _run(tuner: Tuner, make_pool: MakePool, num_values: int) -> Tuned:
    """Run the tuner with a progress bar, which counts one round: later rounds try little more."""
    with progress_bar() as progress:
        task = progress.add_task("settings", total=1 + num_values)
        return tuner.run(make_pool, lambda _: progress.advance(task))


def _trials(found: Tuned) -> object:
    rows = [
        [
            _setting(trial.setting),
            trial.error or (f"{trial.score:.4g}" if trial.score >= 0 else "0"),
        ]
        for trial in found.trials[:_MAX_ROWS]
    ]
    return table(f"{found.base} on {found.workload}", ["setting", found.metric], rows)


def _setting(setting: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items()) or "as it was"
