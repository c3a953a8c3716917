"""Our policy as it is now, or any other, where stored results say how the best did before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from experiments.markdown import table
from experiments.random_arena.cells import Cell
from experiments.random_arena.contenders import FLAGSHIP
from experiments.random_arena.play import Stage
from experiments.random_arena.results import Row
from slosched.evaluate.capacity import TARGETS, Outcomes
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import simulate

HEADS = ("cell", "rate", "requests/s", "best other, %", f"`{FLAGSHIP}` then, %", "now, %")


def lines(row: Row, policy: str | None = None) -> Iterator[list[object]]:
    """Yield a line for the best capacity at each target, and for the overload.

    Plays `policy`, a spec, or ours with the setting that is stored.  At a capacity the best other
    has the target by definition, and what ours had is not stored.  Nor is any result of an overload
    that lasts where the stored one did not.
    """
    if "void" in row:
        return
    cell, policy = Cell(**row["cell"]), policy or row["settings"][FLAGSHIP]
    judging = judging_of(row)
    lasting = judging.in_lasting_overload()
    for target in TARGETS:
        found = [r for r in row["capacity"] if r["target"] == target]
        best = max(r["requests_per_s"] for r in found if r["contender"] != FLAGSHIP)
        if best:
            now = f"{attainment(cell, policy, best, judging):.1%}"
            yield [row["name"], f"best at {target:.0%}", f"{best:.3g}", f"{target:.1%}", "", now]
    shares = {r["policy"]: r["attainment"] for r in row["overload"]}
    then, rate = shares.pop(FLAGSHIP), row["overload"][0]["rate"]
    is_lasting = "overload_requests" in row
    now = f"{attainment(cell, policy, rate, lasting if is_lasting else judging):.1%}"
    best_share = f"{max(shares.values()):.1%}"
    yield [row["name"], "overload", f"{rate:.3g}", best_share, f"{then:.1%}", now]
    if not is_lasting:
        now = f"{attainment(cell, policy, rate, lasting):.1%}"
        yield [row["name"], "overload that lasts", f"{rate:.3g}", "", "", now]


def judging_of(row: Row) -> Stage:
    """Return the windows that judged a stored cell.

    Raises `ValueError` if their requests are not there: others in their place would tell nothing.
    """
    cell = Cell(**row["cell"])
    if str(cell.source()) != row["source"]:
        raise ValueError(
            f"cell {row['name']} was played on {row['source']}, and here is only {cell.source()}: "
            "put its trace into ../shared/traces"
        )
    device = cell.device()
    windows = cell.windows(device, row.get("window_requests") or cell.usual())
    return Stage.of(windows, device, cell.config(device))


def attainment(cell: Cell, policy: str, rate: float, stage: Stage) -> float:
    """Return the share in time of all requests that count, as stored results have it."""
    device = cell.device()
    config = cell.config(device)
    num_good = num_counted = 0
    for window, judged in zip(stage.windows, stage.judged, strict=True):
        requests = simulate(window.scaled_to(rate), make_policy(policy), device, config)
        found = Outcomes.of(requests, config.limits.deadline_rule).among(judged)
        num_good += int((found.good & found.counted).sum())
        num_counted += int(found.counted.sum())
    return num_good / num_counted


def text(rows: Sequence[Row], policy: str | None = None) -> str:
    """Return the table of all lines of stored cells."""
    return table(HEADS, [line for row in rows for line in lines(row, policy)], 2)
