"""Our policy as it is now, where stored results say how the best others and it did before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from experiments.markdown import table
from experiments.random_arena.cells import Cell
from experiments.random_arena.contenders import FLAGSHIP
from experiments.random_arena.play import Stage
from experiments.random_arena.results import Row
from slosched.evaluate.capacity import TARGETS, Outcomes
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate

HEADS = ("cell", "rate", "requests/s", "best other, %", f"`{FLAGSHIP}` then, %", "now, %")


def lines(row: Row) -> Iterator[list[object]]:
    """Yield a line for the best capacity at each target, and one for the overload.

    At a capacity the best other has the target by definition, and what ours had is not stored.
    """
    if "void" in row:
        return
    cell, policy = Cell(**row["cell"]), row["settings"][FLAGSHIP]
    judging = judging_of(row)
    for target in TARGETS:
        found = [r for r in row["capacity"] if r["target"] == target]
        best = max(r["requests_per_s"] for r in found if r["contender"] != FLAGSHIP)
        if best:
            now = f"{attainment(cell, policy, best, judging):.1%}"
            yield [row["name"], f"best at {target:.0%}", f"{best:.3g}", f"{target:.1%}", "", now]
    shares = {r["policy"]: r["attainment"] for r in row["overload"]}
    then, rate = shares.pop(FLAGSHIP), row["overload"][0]["rate"]
    lasting = judging.in_lasting_overload() if "overload_requests" in row else judging
    now = f"{attainment(cell, policy, rate, lasting):.1%}"
    best_share = f"{max(shares.values()):.1%}"
    yield [row["name"], "overload", f"{rate:.3g}", best_share, f"{then:.1%}", now]


def judging_of(row: Row) -> Stage:
    """Return the windows that judged a stored cell."""
    cell = Cell(**row["cell"])
    device = cell.device()
    windows = cell.windows(device, row.get("window_requests") or cell.usual())
    return Stage.of(windows, device, cell.config(device))


def attainment(cell: Cell, policy: str, rate: float, stage: Stage) -> float:
    """Return the share in time of the requests that count, on the windows that judge."""
    device = cell.device()
    config = cell.config(device)
    shares = []
    for window, judged in zip(stage.windows, stage.judged, strict=True):
        requests = simulate(window.scaled_to(rate), make_policy(policy), device, config)
        found = Outcomes.of(requests, config.limits.deadline_rule)
        shares.append(found.among(judged).attainment)
    return fmean(shares)


def text(rows: Sequence[Row]) -> str:
    """Return the table of all lines of stored cells."""
    return table(HEADS, [line for row in rows for line in lines(row)], 2)
