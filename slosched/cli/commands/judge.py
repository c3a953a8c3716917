"""`slosched judge`: a verdict on a policy against the arena's finalists."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from slosched.cli import options
from slosched.cli.console import console, progress_bar
from slosched.cli.search_options import Jobs
from slosched.cli.sigterm import sigterm_as_ctrl_c
from slosched.cli.trace_source import is_kind, read_part
from slosched.core import SloschedError
from slosched.policy.spec import make_policy, policy_classes
from slosched.spelling import meant
from slosched.workload import Trace

if TYPE_CHECKING:
    from slosched.evaluate.capacity import MakePool
    from slosched.evaluate.judge import Judge, Scenario, TimeLimit

_QUICK = 4
"""The number of scenarios that --quick plays, the first ones."""
_TIME_LIMIT_S, _QUICK_TIME_LIMIT_S = 600.0, 120.0
_LAW_EXAMPLES = 60
_LIST = "list"
"""The name that prints all scenarios."""


def _file(path: Path | None) -> Path | None:
    """Return the path; raise BadParameter unless it can be written and ends in .json or .csv."""
    if path is not None and path.suffix not in (".json", ".csv"):
        raise typer.BadParameter(f"{str(path)!r} must end in .json or .csv")
    return options.writable(path)


def _list_scenarios(names: list[str] | None) -> list[str] | None:
    """Print the scenarios and exit if one of the names is `list`; return the names."""
    if names and _LIST in names:
        from slosched.evaluate.judge import scenarios
        from slosched.evaluate.judge.promises import PROMISED

        for name, one in scenarios().items():
            arrivals = " at Poisson arrivals" if one.requests.get("poisson") else ""
            requests = f"{one.requests['kind']}{arrivals} on {one.model}"
            told = f"{name}: {requests}; promised: {PROMISED[one.promise]}, judged by {one.rule}"
            console.print(escape(told), soft_wrap=True, highlight=False)
        raise typer.Exit
    return names


def judge(
    policy: Annotated[
        str,
        typer.Argument(
            metavar="FILE|SPEC",
            help="A file with a policy (my_policy.py, my_policy.py:MyPolicy:margin=0.1), or any "
            "other policy: goodput:margin=0.1.",
        ),
    ],
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPEC",
            help="Play against this policy in place of the arena's finalists: "
            "edf:drop=infeasible.  May be repeated.",
        ),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        # Eager: with `list` nothing is judged, so that no policy is needed.
        typer.Option(
            metavar="NAME",
            callback=_list_scenarios,
            is_eager=True,
            help="Play this scenario of the arena alone: conv-tight; `--scenario list` names all.  "
            "May be repeated.",
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|NAME",
            help="Take the requests from this trace: AzureLLMInferenceTrace_conv.csv.  Default: "
            "made-up requests with the statistics of the arena's public traces.",
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help=f"Play {_QUICK} scenarios, for two minutes at most."),
    ] = False,
    time_limit: Annotated[
        float | None,
        typer.Option(
            parser=options.duration,
            metavar="TIME",
            help="Stop after this time, and tell what is known: 30m.  Default: 10m.",
        ),
    ] = None,
    laws: Annotated[
        bool, typer.Option(help="Whether a policy of your own is first tested on random scenarios.")
    ] = True,
    jobs: Jobs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            dir_okay=False,
            callback=_file,
            metavar="FILE",
            help="Write the answers as JSON or CSV: verdict.json, verdict.csv.",
        ),
    ] = None,
) -> None:
    """Give a verdict on a policy: ahead of the best known ones, level with them, or behind.

    Examples:

    - `slosched judge my_policy.py`
    - `slosched judge goodput:margin=0.2 --against goodput --scenario conv-tight`
    - `slosched judge my_policy.py --quick -o verdict.json`

    In each scenario of the arena it plays against the best published policy, the best simple ones
    and `goodput`, all tuned: the same requests, KV cache and latency model, at the knee (the rate
    at which the best plain policy keeps 90 % of the promises) and at twice that rate.  It looks at
    the results after 6, 12 and 24 windows of requests and stops where the answer is clear.  The
    95 % intervals hold in spite of that.
    """
    from slosched.evaluate.capacity import local_pool  # slow to import
    from slosched.evaluate.judge import Contender, Judge, TimeLimit

    if out is not None and trace is not None:
        options.check_other_file(out, Path(trace), "the trace")
    limit = TimeLimit.from_now(time_limit or (_QUICK_TIME_LIMIT_S if quick else _TIME_LIMIT_S))
    make_policy(policy)
    chosen = _scenarios(scenario, quick, is_on_one_trace=trace is not None)
    rivals = None if not against else {spec: Contender(spec) for spec in dict.fromkeys(against)}
    for spec in rivals or ():
        make_policy(spec)
    found = Judge(Contender(policy), chosen, rivals, None if trace is None else _read(trace))
    if laws:
        _check_laws(policy, limit)
    is_stopped = _run(found, local_pool(jobs or os.cpu_count()), limit)
    _show(found, limit, is_stopped)
    if out is not None:
        from slosched.cli.judge_report import write

        write(found, out)
        console.print(f"wrote {out}", markup=False)
    if is_stopped:
        raise typer.Exit(130)


def _scenarios(
    names: list[str] | None, quick: bool, *, is_on_one_trace: bool
) -> Mapping[str, Scenario]:
    """Return the chosen scenarios; raise ValueError, which lists all, for a name that is none.

    On one trace, scenarios that differ in their requests alone are the same: the first is kept.
    """
    from slosched.evaluate.judge import scenarios

    every = scenarios()
    if unknown := [name for name in names or () if name not in every]:
        raise ValueError(
            f"no scenario {unknown[0]!r}{meant(unknown[0], every)}; there are {', '.join(every)}"
        )
    chosen = names or list(every)[: _QUICK if quick else None]
    found = {name: every[name] for name in dict.fromkeys(chosen)}
    if not is_on_one_trace:
        return found
    unlike = {(one.model, one.promise, one.rule): name for name, one in reversed(found.items())}
    return {name: one for name, one in found.items() if name in unlike.values()}


def _read(source: str) -> Trace:
    if is_kind(source):
        raise ValueError(
            f"--trace {source}: the scenarios make up such requests themselves; name a trace file, "
            "or a public trace that was fetched"
        )
    return read_part(source, None, 0.0, None, skip_bad=False, seed=0)


def _check_laws(policy: str, limit: TimeLimit) -> None:
    """Raise LawBrokenError if a policy of the user's own breaks a law on a random scenario."""
    if all(one.__module__.startswith("slosched.") for one in policy_classes(policy)):
        return
    from slosched.evaluate.judge.time_limit import OutOfTimeError, StuckPolicyError

    try:
        from slosched.testing import LawBrokenError, check_policy
    except ImportError:
        console.print(
            "[yellow]note:[/] the laws of policies were not checked: pip install hypothesis"
        )
        return
    with console.status(f"checking the laws of policies on {_LAW_EXAMPLES} random scenarios"):
        make = partial(make_policy, policy)
        try:
            with limit.ending(policy):
                check_policy(make, max_examples=_LAW_EXAMPLES, conserves_work=False, shrink=False)
        except OutOfTimeError:
            console.print("[yellow]note:[/] the laws of policies were not all checked in time")
            return
        except StuckPolicyError:
            raise
        except SloschedError as error:
            raise LawBrokenError(
                f"{policy} breaks a law of policies: {error}.  `slosched.check_policy` finds the "
                "smallest scenario on which it does (docs/how-to/add-a-policy.md)"
            ) from error
    console.print(f"{escape(policy)} obeys the laws on {_LAW_EXAMPLES} random scenarios")


def _run(judge: Judge, make_pool: MakePool, limit: TimeLimit) -> bool:
    """Run with a progress bar; return True if Ctrl-C or SIGTERM ended it early."""
    with progress_bar() as progress, sigterm_as_ctrl_c():
        task = progress.add_task("finding the knees", total=None)

        def show(done: int, left: int) -> None:
            progress.update(task, description="replays", completed=done, total=done + left)

        try:
            judge.run(make_pool, limit, show)
        except KeyboardInterrupt:
            return True
    return False


def _show(judge: Judge, limit: TimeLimit, is_stopped: bool) -> None:
    from slosched.cli.judge_report import scenario_table, sentence, summary_table

    if any(bout.answers for bout in judge.bouts):
        console.print(scenario_table(judge))
        console.print(summary_table(judge))
    console.print(escape(sentence(judge)), soft_wrap=True)
    if judge.is_out_of_time or is_stopped:
        why = "Ctrl-C or SIGTERM" if is_stopped else f"the time limit of {limit.length_s:g} s"
        console.print(
            f"[yellow]note:[/] stopped by {why}: more time makes some of the answers that are not "
            "sure clear (--time-limit)"
        )
