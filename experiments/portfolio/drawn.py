"""`portfolio` and each of its candidates on the cells of the random arena."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from experiments.random_arena.cells import draw, keepable
from experiments.random_arena.contenders import contenders
from experiments.random_arena.play import Match
from slosched.metrics import RequestRecord
from slosched.metrics.columns import RequestColumns
from slosched.metrics.promises import good_requests
from slosched.perfmodel import FittedModel
from slosched.policy.portfolio.policy import Portfolio, default_candidates
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace

LOADS = (1.0, 2.0)
"""Rates, as multiples of the one at which policies are tuned in the random arena."""
WINDOW_REQUESTS = 900
"""Requests of a window; where they are long they are fewer, as in the random arena."""
PORTFOLIO = "portfolio"


def rows_of(seed: int, number: int) -> Iterator[dict[str, object]]:
    """Yield what each policy came to in a cell at each load; nothing if no rate can be served."""
    cell = draw(seed, number)
    rate = Match(cell, contenders(portfolio=False)).tuning_rate
    if not rate:
        return
    device = cell.device()
    config = cell.config(device)
    window = cell.windows(device, cell.usual(WINDOW_REQUESTS))[0]
    counts = keepable(window, device, config)
    for load in LOADS:
        trace = window.scaled_to(load * rate)
        for spec in (*default_candidates(), PORTFOLIO):
            yield {
                "seed": seed,
                "cell": number,
                "what": str(cell),
                "load": load,
                "policy": spec,
                "num_judged": int(counts.sum()),
                **_played(trace, spec, device, config, counts),
            }


def _played(
    trace: Trace,
    spec: str,
    device: FittedModel,
    config: SimulationConfig,
    counts: npt.NDArray[np.bool_],
) -> dict[str, object]:
    """Return the good requests among those that count, and what the replay cost."""
    policy = make_policy(spec)
    began_s = time.process_time()
    requests = simulate(trace, policy, device, config)
    cpu_s = time.process_time() - began_s
    columns = RequestColumns.of([RequestRecord.from_request(r) for r in requests])
    good = good_requests(columns, config.limits.deadline_rule)
    return {
        "num_good": int(good[counts].sum()),
        "cpu_s": round(cpu_s, 2),
        "num_changes": policy.num_changes if isinstance(policy, Portfolio) else 0,
    }
