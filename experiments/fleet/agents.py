"""Which router for agents?  Sessions whose next turn waits for the last, on four H100."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from itertools import product
from pathlib import Path

import pandas as pd

from experiments.fleet.playing import play_cases
from experiments.fleet.questions import H100
from experiments.fleet.tables import interval
from experiments.markdown import table
from experiments.sessions.cells import BLOCK_TOKENS, traffic
from slosched.core import DeadlineRule, OnInfeasible
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.fleet.setup import FleetSetup
from slosched.fleet.simulate import FleetConfig
from slosched.fleet.view import ReplicaKind
from slosched.kv import PrefixCaching
from slosched.metrics import records_of
from slosched.metrics.programs import num_programs_on_time
from slosched.perfmodel import at_block_size, load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace

RESULTS = Path(__file__).with_name("agents.csv")
PAGE = Path(__file__).with_name("agents.md")
ROUTERS = ("round_robin", "least_requests", "prefix_affine", "lmetric", "cheapest_in_time")
RATES = (1.3,)
"""Requests/s of the whole fleet, as if answers took 30 ms a token: `prefix_affine` keeps nearly all
programs on time with `fcfs`."""
SEEDS = (101, 102, 103)
PLANNERS = {
    "`fcfs`": ("fcfs", OnInfeasible.REJECT),
    "`goodput`": ("goodput", OnInfeasible.RELEGATE),
    "`goodput` that rejects": ("goodput", OnInfeasible.REJECT),
}
"""Policies, with what becomes of turns that they cannot serve in time, but for first ones."""
_NUM_REQUESTS = 2000
_KV_TOKENS = 432_992
_KEY = ["rate", "planner", "router", "seed"]


def play() -> None:
    """Play what agents.csv does not have, and write it there."""
    kept = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=_KEY)
    known = set(kept[_KEY].itertuples(index=False, name=None))
    cases = [case for case in product(RATES, PLANNERS, ROUTERS, SEEDS) if case not in known]
    play_cases(cases, _row, kept, RESULTS)


def page() -> str:
    """Return the tables of agents.csv: programs on time, and turns as they were promised."""
    results = pd.read_csv(RESULTS)
    parts = [
        f"# {__doc__}",
        f"Made by `python -m experiments.fleet agents`.  Each figure is the mean of {len(SEEDS)} "
        f"replays of {_NUM_REQUESTS:,} turns, about 53 programs, with its 95 % interval.  A "
        "program is on time if its last token comes within what its turns are promised and its "
        "pauses take together; a turn is if its TTFT and its mean TPOT are as promised.  A turn "
        "that `goodput` cannot serve in time is served without a promise, unless it is the "
        "first of its program, or `goodput` rejects it as well.",
    ]
    for rate, found in results.groupby("rate"):
        heads = ["router", *(f"{p}, {what}" for what in ("programs", "turns") for p in PLANNERS)]
        rows = [(f"`{router}`", *_cells(found[found["router"] == router])) for router in ROUTERS]
        parts.append(f"## {rate:g} requests/s\n\n{table(heads, rows, 1)}")
    return "\n\n".join(parts) + "\n"


def _cells(found: pd.DataFrame) -> list[str]:
    cells = []
    for column, planner in product(("programs_on_time", "turns_in_time"), PLANNERS):
        shares = found[found["planner"] == planner][column].to_numpy(dtype=float)
        mean, half = interval(shares)
        cells.append(f"{100 * mean:.1f} ± {100 * half:.1f} %")
    return cells


def _row(rate: float, planner: str, router: str, seed: int) -> Mapping[Hashable, object]:
    policy, late = PLANNERS[planner]
    trace = _traffic(rate, seed, late)
    requests = _fleet(router).simulate(trace, make_policy(policy), seed=seed)
    on_time, num_programs = num_programs_on_time(list(records_of(requests, DeadlineRule.MEAN_TPOT)))
    return {
        "rate": rate,
        "planner": planner,
        "router": router,
        "seed": seed,
        "programs_on_time": round(on_time / num_programs, 5),
        "turns_in_time": round(Outcomes.of(requests, DeadlineRule.MEAN_TPOT).attainment, 5),
    }


@cache
def _traffic(rate: float, seed: int, late: OnInfeasible) -> Trace:
    return traffic(rate, seed, late, _NUM_REQUESTS)


@cache
def _fleet(router: str) -> FleetSetup:
    """Return four replicas, each with a prefix cache."""
    model = at_block_size(load_model(H100), BLOCK_TOKENS)
    config = SimulationConfig(
        num_blocks=_KV_TOKENS // BLOCK_TOKENS,
        block_size=BLOCK_TOKENS,
        prefix_cache=PrefixCaching.HASH,
    )
    return FleetSetup((ReplicaKind(model, config),) * 4, (H100,) * 4, router, FleetConfig())
