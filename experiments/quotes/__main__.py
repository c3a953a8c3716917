"""`python -m experiments.quotes`: how good quotes are, and what refusals on arrival cost.

It plays synthetic traces that are fitted to Azure's on bundled devices, and writes `results.md`
next to this file.  It takes about ten minutes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Annotated, TypedDict

import typer

from experiments.quotes.clients import ObedientClients
from experiments.quotes.replica import (
    CELLS,
    HELD_OUT,
    TIERS,
    Cell,
    LettingIn,
    LettingInAlike,
    NotingDoor,
)
from slosched.cli.console import console
from slosched.core import SLO, DeadlineRule, EndReason, Request, RequestStatus
from slosched.metrics import RequestRecord, is_good
from slosched.policy import Door
from slosched.policy.door import Refuse
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import make_requests
from slosched.workload import Trace

_RESULTS = Path(__file__).parent / "results.md"
_POLICY = "goodput"
"""The policy behind the door of `slosched serve`."""
_BY_ARRIVAL = "sarathi:drop=infeasible"
_DROPPING = (_BY_ARRIVAL, "edf:drop=infeasible", _POLICY)
_LOADS = (0.8, 1.0, 1.3, 2.0)


class Options(TypedDict, total=False):
    """Options of the door."""

    level: float
    busy_level: float
    most_late: float


_PLAIN: Options = {"busy_level": 0.0}
"""A door that is as strict in an overload that lasts as in a burst."""
_LEVELS: tuple[Options, ...] = (
    {"busy_level": 0.4},
    _PLAIN,
    {"busy_level": 0.0, "level": 0.5},
    {"busy_level": 0.0, "most_late": 0.02},
)
_NUM_REQUESTS = 1500
_SEED = 7
_SEEDS = (101, 102, 103)
"""Those of refusals; the door was designed on others."""

_RATES = ", ".join(f"{c.rate:g}/s ({c})" for c in (*CELLS, *HELD_OUT))
_INTRODUCTION = (
    "# Quotes\n\nWritten by `python -m experiments.quotes`. At a load of 1 about 1 % of the "
    f"requests are late: {_RATES}. The times are the promise: a TTFT, to which twice the request's "
    f"own prefill is added, and a TPOT. {_NUM_REQUESTS} requests each, 5 % noise, latency model "
    f"learnt online. The cells after the first {len(CELLS)} were not looked at while the door was "
    "designed. Where three TTFTs are promised, 30 % of the requests are promised 0.5 s, 40 % 2 s, "
    "and 30 % 10 s.\n\n“Would have been in time”: of those refused on arrival one in ten, drawn by "
    "its id, was let in all the same, behind all others and without its SLO, so that it makes no "
    "other late."
)

app = typer.Typer(help=__doc__, add_completion=False)


def good(requests: Sequence[Request]) -> int:
    records = map(RequestRecord.from_request, requests)
    return sum(is_good(record, DeadlineRule.MEAN_TPOT) for record in records)


def are_covered(cell: Cell, spec: str, trace: Trace) -> list[tuple[SLO, bool]]:
    """Return for each first token whether it came by the time that the quote of 90 % had said."""
    door = NotingDoor(make_policy(spec), refuse=Refuse.NOTHING)
    return [
        (r.slo, r.token_times_s[0] - r.arrival_s <= door.ttft_s[r.request_id][0.9])
        for r in cell.play(door, trace)
        if r.token_times_s
    ]


def coverage_rows() -> Iterator[str]:
    yield "| policy | cell | " + " | ".join(f"load {load:g}" for load in _LOADS) + " |"
    yield "|---|---|" + "---|" * len(_LOADS)
    for spec in ("fcfs", "sjf", *_DROPPING):
        for cell in CELLS:
            traces = [cell.trace(load, _NUM_REQUESTS, _SEED) for load in _LOADS]
            shares = [
                mean(is_in_time for _, is_in_time in are_covered(cell, spec, trace))
                for trace in traces
            ]
            yield f"| `{spec}` | {cell.device}, {cell.kind} | {_percentages(shares)} |"


def tier_rows() -> Iterator[str]:
    yield "| policy | cell | TTFT | " + " | ".join(f"load {load:g}" for load in _LOADS) + " |"
    yield "|---|---|---|" + "---|" * len(_LOADS)
    for spec, cell in product(_DROPPING, CELLS):
        traces = [cell.trace(load, _NUM_REQUESTS, _SEED).with_slo(TIERS) for load in _LOADS]
        found = [are_covered(cell, spec, trace) for trace in traces]
        for tier in TIERS.slos:
            shares = [mean(is_in_time for slo, is_in_time in each if slo == tier) for each in found]
            named = f"{cell.device}, {cell.kind} | {tier.ttft_s:g} s"
            yield f"| `{spec}` | {named} | {_percentages(shares)} |"


def _percentages(shares: Iterable[float]) -> str:
    return " | ".join(f"{100 * share:.1f}" for share in shares)


def refusal_rows() -> Iterator[str]:
    yield (
        "| policy | cell | load | good, of those by waiting | rejected | within 20 ms "
        "| within 100 ms | would have been in time | in time of those let in |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    for spec, cells in ((_POLICY, (*CELLS, *HELD_OUT)), (_BY_ARRIVAL, CELLS)):
        for cell, load in product(cells, (1.5, 2.0, 3.0)):
            yield f"| `{spec}` | {cell} | {load:g} | {refusals(cell, spec, load, _PLAIN)}"


def level_rows() -> Iterator[str]:
    yield (
        "| options | cell | good, of those by waiting | rejected | within 20 ms "
        "| within 100 ms | would have been in time | in time of those let in |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for cell, options in product((*CELLS, *HELD_OUT), _LEVELS):
        named = ", ".join(f"`{name}={value:g}`" for name, value in options.items())
        found = refusals(cell, _POLICY, 3.0, options)
        yield f"| {named or 'the defaults'} | {cell} | {found}"


@cache
def num_good_by_waiting(cell: Cell, spec: str, load: float) -> int:
    return sum(
        good(cell.play(make_policy(spec), cell.trace(load, _NUM_REQUESTS, seed))) for seed in _SEEDS
    )


def refusals(cell: Cell, spec: str, load: float, options: Options) -> str:
    num_waited = num_good_by_waiting(cell, spec, load)
    num_good = num_let_in = num_rejected = 0
    soon: list[bool] = []
    at_once: list[bool] = []
    tries: list[bool] = []
    for seed in _SEEDS:
        door = LettingIn(make_policy(spec), **options)
        requests = cell.play(door, cell.trace(load, _NUM_REQUESTS, seed))
        tried = [r for r in requests if r.request_id in door.promised]
        served = [r for r in requests if r.request_id not in door.promised]
        rejected = [r for r in served if r.status is RequestStatus.REJECTED]
        waits_s = [(r.end_s or 0.0) - r.arrival_s for r in rejected] + [0.0] * len(tried)
        tries += [would_be_good(r, door.promised[r.request_id]) for r in tried]
        at_once += [wait_s <= 0.02 for wait_s in waits_s]
        soon += [wait_s <= 0.1 for wait_s in waits_s]
        num_good += good(served)
        num_rejected += len(waits_s)
        num_let_in += len(served) - sum(wait_s == 0 for wait_s in waits_s[: len(rejected)])
    return (
        f"{100 * num_good / max(1, num_waited):.1f} % | {num_rejected} | {percent(at_once)} | "
        f"{percent(soon)} | {sum(tries)} of {len(tries)} | {100 * num_good / num_let_in:.1f} % |"
    )


def otherwise_rows() -> Iterator[str]:
    yield "| cell | load | good, of one in ten let in like all others | good, if all had waited |"
    yield "|---|---|---|---|"
    for cell, load in product(CELLS, (1.5, 2.0, 3.0)):
        yield f"| {cell} | {load:g} | {otherwise(cell, load)}"


def otherwise(cell: Cell, load: float) -> str:
    """Return what became of refused requests that took the place of others, and without a door."""
    let_in: list[Request] = []
    waited: list[Request] = []
    for trace in (cell.trace(load, _NUM_REQUESTS, seed) for seed in _SEEDS):
        door = LettingInAlike(make_policy(_POLICY), **_PLAIN)
        requests = cell.play(door, trace)
        let_in += [r for r in requests if r.request_id in door.promised]
        requests = cell.play(Door(make_policy(_POLICY), **_PLAIN), trace)
        refused = {r.request_id for r in requests if r.end_reason is EndReason.OVERLOAD}
        without = cell.play(make_policy(_POLICY), trace)
        waited += [r for r in without if r.request_id in refused]
    return f"{good(let_in)} of {len(let_in)} | {good(waited)} of {len(waited)} |"


def would_be_good(request: Request, slo: SLO) -> bool:
    """Tell whether a request that was served without its SLO kept it all the same."""
    times_s = request.token_times_s
    if not times_s or times_s[0] - request.arrival_s > slo.ttft_s:
        return False
    return len(times_s) < 2 or (times_s[-1] - times_s[0]) / (len(times_s) - 1) <= slo.tpot_s


def percent(shares: Sequence[bool]) -> str:
    return f"{100 * sum(shares) / len(shares):.1f} %" if shares else "none"


def second_try_rows() -> Iterator[str]:
    yield "| cell | burst | rejected | second tries in time | they came after (median) |"
    yield "|---|---|---|---|---|"
    for cell, burst_s in product(CELLS, (5.0, 20.0)):
        yield f"| {cell} | {burst_s:g} s | {second_tries(cell, burst_s)}"


def second_tries(cell: Cell, burst_s: float) -> str:
    trace = cell.burst(burst_s, _SEED)
    lengths = {r.request_id: r.num_output_tokens for r in trace.requests}
    clients = ObedientClients(Door(make_policy(_POLICY)), cell.model, cell.config, lengths)
    clients.play(make_requests(trace, cell.config.kv_tokens))
    tries = clients.second_tries
    share = 100 * good(tries) / max(1, len(tries))
    waits_s = list(clients.waits_s) or [0.0]
    return f"{len(tries)} | {share:.1f} % | {median(waits_s):.0f} s |"


_SECTIONS = {
    "coverage": (
        "## Share of first tokens that come by the quote of 90 %, in percent",
        coverage_rows,
    ),
    "tiers": (
        "## The same where three TTFTs are promised, by TTFT",
        tier_rows,
    ),
    "refusals": ("## Refused on arrival (`+door:busy_level=0`)", refusal_rows),
    "levels": (
        "## Around `goodput`, with other options, at a load of 3",
        level_rows,
    ),
    "otherwise": (
        "## What else might have become of those refused by `goodput+door:busy_level=0`",
        otherwise_rows,
    ),
    "second-tries": (
        "## Clients of `goodput+door` that come again when they are told to, after a burst",
        second_try_rows,
    ),
}


@app.command()
def run(
    sections: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(_SECTIONS)}; all if none is named.")
    ] = None,
) -> None:
    """Play everything, or the named sections, and write them into results.md."""
    for name in sections or _SECTIONS:
        title, rows = _SECTIONS[name]
        lines = []
        for row in rows():
            console.print(row, markup=False)
            lines.append(row)
        _write(title, "\n".join(lines))


def _write(title: str, table: str) -> None:
    """Replace the table under `title` in results.md, and the introduction."""
    text = _RESULTS.read_text(encoding="utf-8") if _RESULTS.exists() else ""
    parts = dict(
        zip(*[iter(re.split(r"^(## .*)$", text, flags=re.MULTILINE)[1:])] * 2, strict=True)
    )
    parts[title] = table
    sections = [
        f"{each}\n\n{parts[each].strip()}" for each, _ in _SECTIONS.values() if each in parts
    ]
    _RESULTS.write_text("\n\n".join([_INTRODUCTION, *sections]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
