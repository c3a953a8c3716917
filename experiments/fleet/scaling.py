"""Does scaling pay?  A day's traffic on fleets of a fixed size and on fleets that follow it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.fleet.questions import TRACES
from experiments.fleet.tables import interval
from experiments.markdown import table
from slosched.cli.console import progress_bar
from slosched.core import SLO, DeadlineRule
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.fleet.scaling import Lease, Scaling
from slosched.fleet.setup import FleetSetup
from slosched.fleet.simulate import FleetConfig
from slosched.fleet.view import ReplicaKind
from slosched.metrics import records_of, summarize
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig
from slosched.workload import Trace, TraceRequest, read_trace
from slosched.workload.arrivals import DailyArrivals

RESULTS = Path(__file__).with_name("scaling.csv")
PAGE = Path(__file__).with_name("scaling.md")
DEVICE = "a100/llama-3.1-70b-tp4"
PROMISE = SLO(2.0, 0.1)
DAY_S = 3600.0
"""A day is played in an hour, 24 times as fast as it is."""
RATE = 9.0
"""Mean requests/s; it is 3.6 at the trough and 14.4 at the peak."""
STARTUP_S = 60.0
FEWEST, MOST = 2, 8
DAYS = (0, 1, 2)
FIXED = (4, 5)
SCALERS = (
    "predicted",
    "predicted:load=0.9,hold_s=60",
    "queue_length:target=5",
    "kv_use:target=0.1",
)
FLEETS = (*map(str, FIXED), *SCALERS)
"""The replicas of a fixed fleet, or the scaler of one that has `FEWEST` to `MOST`."""


def play() -> None:
    """Play what scaling.csv does not have, and write it there."""
    key = ["fleet", "day"]
    kept = pd.read_csv(RESULTS, dtype={"fleet": str}) if RESULTS.exists() else None
    rows: list[Mapping[Hashable, object]] = [] if kept is None else [*kept.to_dict("records")]
    known = {tuple(row[name] for name in key) for row in rows}
    cases = [case for case in product(DAYS, FLEETS) if case[::-1] not in known]
    with progress_bar() as progress:
        for day, fleet in progress.track(cases, description="replaying"):
            rows.append(_row(fleet, day))
            pd.DataFrame(rows).to_csv(RESULTS, index=False)


def page() -> str:
    """Return the table of scaling.csv: attainment, GPU hours, and what they are of a fixed fleet's.

    The fixed fleet is the smallest with which 99 % of all requests are in time on average.
    """
    results = pd.read_csv(RESULTS, dtype={"fleet": str})
    wide = results.pivot_table(index="day", columns="fleet", values=["in_time", "gpu_s"])
    means = {name: float(wide["in_time"][name].mean()) for name in map(str, FIXED)}
    base = next((name for name, mean in means.items() if mean >= 0.99), str(FIXED[-1]))
    rows = []
    for fleet in FLEETS:
        hours = wide["gpu_s"][fleet].to_numpy(dtype=float) / 3600
        share = wide["gpu_s"][fleet].to_numpy(dtype=float) / wide["gpu_s"][base]
        name = f"{fleet} replicas" if fleet.isdecimal() else f"`{fleet}`"
        in_time = wide["in_time"][fleet].to_numpy(dtype=float)
        rows.append((name, _cell(100 * in_time, " %"), _cell(hours), _cell(100 * share, " %", 0)))
    heads = ["fleet", "in time", "GPU hours", f"of those of {base} replicas"]
    text = (
        "Made by `python -m experiments.fleet scaling`.  Each figure is the mean of "
        f"{len(DAYS)} days with its 95 % interval (Student's t).  The days have the lengths of "
        f"Azure's conversations of 2023 in random order.  Arrivals are Poisson at {RATE:g}/s on "
        f"average, and follow a day that is played in {DAY_S / 3600:g} h, from trough to "
        f"trough.  The promise is {PROMISE.ttft_s:g} s and {1000 * PROMISE.tpot_s:g} ms; "
        f"replicas are {DEVICE} under `goodput`, behind `least_requests`, and start in "
        f"{STARTUP_S:g} s.  Scaled fleets have {FEWEST} to {MOST} of them."
    )
    return f"# {__doc__}\n\n{text}\n\n{table(heads, rows, 1)}\n"


def _cell(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], unit: str = "", digits: int = 1
) -> str:
    mean, half = interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}{unit}"


def _row(fleet: str, day: int) -> Mapping[Hashable, object]:
    leases: list[Lease] = []
    setup = fleet_of(fleet)
    requests = setup.simulate(traffic(day), make_policy("goodput"), day, None, leases.append)
    records = records_of(requests, DeadlineRule.MEAN_TPOT)
    return {
        "fleet": fleet,
        "day": day,
        "in_time": round(summarize(records, DeadlineRule.MEAN_TPOT).attainment, 5),
        "gpu_s": round(sum(lease.gpu_s for lease in leases), 1),
    }


def fleet_of(name: str) -> FleetSetup:
    """Return one of FLEETS."""
    model = load_model(DEVICE)
    kind = ReplicaKind(model, SimulationConfig(num_blocks=kv_capacity_tokens(model) // 16))
    num = int(name) if name.isdecimal() else MOST
    scaling = None if name.isdecimal() else Scaling(name, FEWEST)
    config = FleetConfig(startup_s=STARTUP_S)
    return FleetSetup((kind,) * num, (DEVICE,) * num, "least_requests", config, scaling)


def traffic(day: int) -> Trace:
    """Return the requests of a day, with their promise; the number of the day is the seed."""
    rng = np.random.default_rng(day)
    arrivals = DailyArrivals(RATE, day_s=DAY_S)
    # `DailyArrivals` begins at the mean rate, three quarters of a day after the trough.
    times_s = arrivals.times_s(round(2 * RATE * DAY_S), rng) - 0.75 * DAY_S
    times_s = np.round(times_s[(times_s >= 0) & (times_s < DAY_S)], 6)
    lengths = _lengths()
    drawn = rng.integers(len(lengths), size=len(times_s))
    requests = [
        TraceRequest(str(i), float(at_s), *lengths[k])
        for i, (at_s, k) in enumerate(zip(times_s, drawn, strict=True))
    ]
    return Trace.of(requests, f"day {day}").with_slo(PROMISE)


@cache
def _lengths() -> list[tuple[int, int]]:
    """Return prompt and output tokens of all requests of the trace."""
    trace = read_trace(TRACES / "azure_conv_2023.csv")
    return [(r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests]
