"""`python -m experiments.quotes`: how good quotes are, and what refusals on arrival cost.

It plays synthetic traces that are fitted to Azure's on bundled devices, and writes `results.md`
next to this file.  It takes about five minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median

import typer

from experiments.quotes.clients import ObedientClients
from experiments.quotes.replica import CELLS, Cell, NotingDoor
from slosched.cli.console import console
from slosched.core import DeadlineRule, EndReason, Request, RequestStatus
from slosched.metrics import RequestRecord, is_good
from slosched.policy import Door
from slosched.policy.door import Refuse
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import make_requests
from slosched.workload import Trace

_RESULTS = Path(__file__).parent / "results.md"
_DROPPING = ("sarathi:drop=infeasible", "edf:drop=infeasible", "goodput")
_LOADS = (0.8, 1.0, 1.3, 2.0)
_NUM_REQUESTS = 1500
_SEED = 7

app = typer.Typer(help=__doc__, add_completion=False)


def good(requests: Sequence[Request]) -> int:
    records = map(RequestRecord.from_request, requests)
    return sum(is_good(record, DeadlineRule.MEAN_TPOT) for record in records)


def covered(cell: Cell, spec: str, load: float) -> float:
    """Return the share of first tokens that came by the time that the quote of 90 % had said."""
    door = NotingDoor(make_policy(spec), refuse=Refuse.NOTHING)
    requests = cell.play(door, load, _NUM_REQUESTS, _SEED)
    begun = [r for r in requests if r.token_times_s]
    in_time = [r.token_times_s[0] - r.arrival_s <= door.ttft_s[r.request_id][0.9] for r in begun]
    return sum(in_time) / len(in_time)


def coverage_rows() -> Iterator[str]:
    yield "| policy | cell | " + " | ".join(f"load {load:g}" for load in _LOADS) + " |"
    yield "|---|---|" + "---|" * len(_LOADS)
    for spec in ("fcfs", "sjf", *_DROPPING):
        for cell in CELLS:
            shares = (f"{100 * covered(cell, spec, load):.1f}" for load in _LOADS)
            yield f"| `{spec}` | {cell.device}, {cell.kind} | {' | '.join(shares)} |"


def refusal_rows() -> Iterator[str]:
    yield (
        "| policy | cell | load | good, of those by waiting | rejected | of these on arrival "
        "| within 100 ms | median | refused on arrival, but good by waiting |"
    )
    yield "|---|---|---|---|---|---|---|---|---|"
    yield from _rows((1.5, 3.0), "", refusals)


def refusals(cell: Cell, spec: str, load: float) -> str:
    waited = cell.play(make_policy(spec), load, _NUM_REQUESTS, _SEED)
    served = {r.request_id for r in waited if good([r])}
    requests = cell.play(Door(make_policy(spec)), load, _NUM_REQUESTS, _SEED)
    rejected = [r for r in requests if r.status is RequestStatus.REJECTED]
    times_s = [(r.end_s or 0.0) - r.arrival_s for r in rejected]
    refused = [r for r in rejected if r.end_reason in (EndReason.OVERLOAD, EndReason.UNKEEPABLE)]
    wrong = sum(r.request_id in served for r in refused)
    return (
        f"{100 * good(requests) / max(1, len(served)):.1f} % | {len(rejected)} | "
        f"{100 * len(refused) / max(1, len(rejected)):.1f} % | "
        f"{100 * sum(t < 0.1 for t in times_s) / max(1, len(times_s)):.1f} % | "
        f"{1000 * median(times_s or [0]):.0f} ms | {100 * wrong / max(1, len(refused)):.1f} % |"
    )


def second_try_rows() -> Iterator[str]:
    yield "| policy | cell | burst | rejected | second tries in time | they came after (median) |"
    yield "|---|---|---|---|---|---|"
    yield from _rows((5.0, 20.0), " s", second_tries)


def _rows(
    values: Sequence[float], unit: str, measured: Callable[[Cell, str, float], str]
) -> Iterator[str]:
    """Yield a row for each policy that drops requests, each cell and each value."""
    for spec, cell, value in product(_DROPPING, CELLS, values):
        shown = f"{value:g}{unit}"
        yield f"| `{spec}` | {cell.device}, {cell.kind} | {shown} | {measured(cell, spec, value)}"


def second_tries(cell: Cell, spec: str, burst_s: float) -> str:
    """Play a burst at a load of 3, then 60 s at a load of 0.6."""
    burst = cell.trace(3.0, int(3 * cell.rate * burst_s), _SEED).requests
    calm = cell.trace(0.6, int(0.6 * cell.rate * 60), _SEED + 1).requests
    end_s = burst[-1].arrival_s
    moved = [
        replace(r, request_id=f"calm-{r.request_id}", arrival_s=end_s + r.arrival_s) for r in calm
    ]
    trace = Trace.of([*burst, *moved], "burst")
    lengths = {r.request_id: r.num_output_tokens for r in trace.requests}
    clients = ObedientClients(Door(make_policy(spec)), cell.model, cell.config, lengths)
    clients.play(make_requests(trace, cell.config.kv_tokens))
    tries = clients.second_tries
    share = 100 * good(tries) / max(1, len(tries))
    waits_s = list(clients.waits_s) or [0.0]
    return f"{len(tries)} | {share:.1f} % | {median(waits_s):.0f} s |"


@app.command()
def run() -> None:
    """Play everything and write results.md."""
    parts = [
        "# Quotes",
        "Written by `python -m experiments.quotes`. A load of 1 is "
        + ", ".join(f"{c.rate:g}/s ({c.device}, {c.kind})" for c in CELLS)
        + f". {_NUM_REQUESTS} requests each, Llama-3.1-8B, TTFT 1 s + 2 × prefill, TPOT 50 ms, "
        "5 % noise, latency model learnt online.",
        "## Share of first tokens that come by the quote of 90 %, in percent",
    ]
    sections = [
        (parts.pop(), coverage_rows()),
        ("## Refused on arrival (`+door`)", refusal_rows()),
        ("## Clients that come again when they are told to, after a burst", second_try_rows()),
    ]
    for title, rows in sections:
        lines = []
        for row in rows:
            console.print(row, markup=False)
            lines.append(row)
        parts += [title, "\n".join(lines)]
    _RESULTS.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
