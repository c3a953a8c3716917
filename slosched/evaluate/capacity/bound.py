"""Rates above which no scheduler reaches a target on the windows of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from slosched.evaluate.bounds import Demand, fleet_demand, fluid_bound, on_time_bound
from slosched.evaluate.capacity.pool import MakePool, give, given
from slosched.evaluate.capacity.rates import Lattice, Search
from slosched.fleet.view import ReplicaKind
from slosched.workload.trace import Trace

_PRECISION = 0.03
_HIGHEST = 1000.0
"""The search's reach from the guess, as a factor; an SLO that allows more is no limit."""


def bound_windows(
    windows: Sequence[Trace],
    replicas: Sequence[ReplicaKind],
    targets: Sequence[float],
    guess: float,
    make_pool: MakePool,
) -> dict[float, float]:
    """Return for each target a rate at which L1 and L2 no longer leave it possible to `replicas`.

    The rate is inf if there is none.  The windows are pooled as for attainment, and the search
    begins at `guess` (requests/s).  A bound counts all requests of a window, while a capacity
    counts those after the warm-up.  Where the first requests are easier, as after an idle time,
    the bound is higher than it need be.  Where they are harder, a capacity may exceed it.
    """
    lattice = Lattice.between(guess / _HIGHEST, guess * _HIGHEST, _PRECISION)
    searches = {t: Search(lattice, t, lattice.nearest(guess), margin=0) for t in targets}
    offered = sum(len(window) for window in windows)
    known: dict[int, float] = {}
    with make_pool(partial(give, _Windows(windows, replicas))) as pool:
        try:
            while places := {k for search in searches.values() for k in search.next_places(known)}:
                asked = {
                    k: [pool.submit(_num_possible, i, lattice.rate(k)) for i in range(len(windows))]
                    for k in sorted(places)
                }
                known |= {k: sum(f.result() for f in asked[k]) / offered for k in asked}
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # after Ctrl-C nobody waits for the rest
    bounds = {}
    for target, search in searches.items():
        low, high = search.bracket(known)
        bounds[target] = (
            float("inf") if high is None else 0.0 if low is None else lattice.rate(high)
        )
    return bounds


@dataclass
class _Windows:
    """The windows of a sweep in a worker process, and the replicas that serve them."""

    windows: Sequence[Trace]
    replicas: Sequence[ReplicaKind]
    demands: dict[int, Demand] = field(default_factory=dict)
    """Demands of windows at their own rates, kept because they take longer than a bound."""

    def demand(self, index: int) -> Demand:
        """Return the demand of a window at its own rate."""
        if index not in self.demands:
            self.demands[index] = fleet_demand(self.windows[index], self.replicas)
        return self.demands[index]


def _num_possible(index: int, rate: float) -> int:
    """Return the number of a window's requests that any scheduler could serve well at this rate."""
    setup = given(_Windows)
    demand = setup.demand(index).at_speed(rate / setup.windows[index].rate)
    return min(fluid_bound(demand).num_good, on_time_bound(demand).num_good)
