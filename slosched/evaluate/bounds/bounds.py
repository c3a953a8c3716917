"""All bounds of a trace side by side, and the share of them that a replay reached."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slosched.core import LatencyModel
from slosched.evaluate.bounds.demand import Demand, demand_of
from slosched.evaluate.bounds.hindsight import hindsight_bound
from slosched.evaluate.bounds.on_time import Bound, fluid_bound, on_time_bound
from slosched.evaluate.bounds.pool import pooled
from slosched.evaluate.bounds.roofline import roofline_bound, roofline_of
from slosched.fleet.split_setup import AnyFleet, SplitSetup
from slosched.fleet.view import ReplicaKind
from slosched.kv import PrefixCaching
from slosched.perfmodel import FittedModel
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.trace import Trace

_DOUBLINGS = [2.0**i for i in range(31)]


@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a trace: no policy serves more of its requests well than each of them says."""

    each: tuple[Bound, ...]
    why_none_holds: str | None = None
    """The feature of the replica that the bounds cannot follow, such as noise; None if all hold."""

    @property
    def tightest(self) -> Bound:
        """Return the lowest bound; of equal ones the first, which is the simplest."""
        return min(self.each, key=lambda bound: bound.num_good)

    def ratio(self, num_good: int) -> float:
        """Return the share of the tightest bound that a replay of the whole trace reached.

        It is 1 if nothing was possible, and NaN if no bound holds.
        """
        if self.why_none_holds:
            return math.nan
        most = self.tightest.num_good
        return num_good / most if most else 1.0


def bounds_of(
    trace: Trace,
    model: LatencyModel,
    config: SimulationConfig | None = None,
    *,
    hindsight: bool = False,
) -> Bounds:
    """Return L1, L2 and L4 of one replica with the limits, deadline rule and KV cache of `config`.

    `hindsight` adds L3.  L4 is left out unless the model says which GPU and model it was measured
    on, and `roofline_of` knows both.  Takes some 4 s for 3,000 requests, and with L3 another 3 s
    for every 100.

    The bounds assume steps that take the time that `model` predicts.  With `disturbances` in
    `config` they are still computed, as a reference, but a lucky replay could exceed them.
    `why_none_holds` then says so.
    """
    config = config or SimulationConfig()
    limits, kv_tokens = config.limits, config.kv_tokens
    demand = demand_of(trace, model, limits, kv_tokens)
    each = [fluid_bound(demand), on_time_bound(demand)]
    if hindsight:
        each.append(hindsight_bound(trace, model, limits, kv_tokens))
    roofline = roofline_of(model.provenance) if isinstance(model, FittedModel) else None
    if roofline is not None:
        each.append(roofline_bound(trace, roofline, limits, kv_tokens))
    return Bounds(tuple(each), why_no_bound_holds(trace, config))


def fleet_bounds(trace: Trace, fleet: AnyFleet) -> Bounds:
    """Return L1 and L2 of all replicas of a fleet together, behind any router.

    That replicas fail, start late, or hand requests over only takes from what the fleet can do.
    """
    demand = fleet_demand(trace, fleet.replicas)
    each = fluid_bound(demand), on_time_bound(demand)
    return Bounds(each, why_no_fleet_bound_holds(trace, fleet))


def why_no_fleet_bound_holds(trace: Trace, fleet: AnyFleet) -> str | None:
    """Return None if good requests may be divided by a bound; else the reason, in words."""
    kinds = dict.fromkeys(fleet.replicas)
    if isinstance(fleet, SplitSetup) and len(kinds) > 1:
        return "it takes a request as served by one kind of replica, and the pools are of several"
    reasons = (why_no_bound_holds(trace, kind.config) for kind in kinds)
    return next((reason for reason in reasons if reason), None)


def fleet_demand(trace: Trace, replicas: Sequence[ReplicaKind]) -> Demand:
    """Return what the trace needs of these replicas together."""
    return pooled(
        [
            (demand_of(trace, kind.model, kind.config.limits, kind.config.kv_tokens), number)
            for kind, number in Counter(replicas).items()
        ]
    )


def why_no_bound_holds(trace: Trace, config: SimulationConfig) -> str | None:
    """Return None if good requests may be divided by a bound; else the reason, in words."""
    if config.prefix_cache is not PrefixCaching.OFF and trace.prefix_block_tokens is not None:
        return "it counts every prompt token as work, and the prefix cache saves some"
    if config.prefix_cache is PrefixCaching.OFF and config.window_tokens is not None:
        return (
            "it counts the KV blocks of whole contexts, and with a sliding window requests give "
            "back those that no token sees"
        )
    if trace.is_closed_loop:
        return "it knows when each request arrives, and turns of sessions wait for each other"
    if config.drafts is not None:
        return "it counts a step for every output token, and accepted draft tokens save some"
    if config.disturbances.are_none:
        return None
    return f"the simulated steps do not take what the latency model says ({config.disturbances})"


@dataclass(frozen=True, slots=True)
class CapacityBound:
    """A rate above which no policy reaches the attainment."""

    name: str
    attainment: float
    rate: float
    """Offered requests/s; inf if nothing bounds it, 0 if not even the lowest rate allows it."""


def capacity_bound(
    trace: Trace,
    model: LatencyModel,
    config: SimulationConfig | None = None,
    attainment: float = 0.9,
    *,
    tolerance: float = 0.01,
) -> CapacityBound:
    """Return the highest rate, by time compression, at which L1 and L2 leave `attainment` possible.

    L1 never rises with the rate, so its crossing alone is a proof.  Below it, bisection finds L2's
    crossing to a share of `tolerance`, from above.  It would miss a faster trace that can be served
    better than a slower one, as any such search would.  Raises ValueError for an attainment or a
    tolerance out of range, and for a trace that arrives in one instant.
    """
    if not 0 < attainment <= 1:
        raise ValueError(f"attainment must be a share in (0, 1], not {attainment!r}")
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance must be a share in (0, 1), not {tolerance!r}")
    if not math.isfinite(trace.rate):
        raise ValueError(
            f"trace {trace.name!r} arrives in one instant, so that it cannot be compressed"
        )
    config = config or SimulationConfig()
    demand = demand_of(trace, model, config.limits, config.kv_tokens)
    if len(demand.release_s) < attainment * len(trace):
        return CapacityBound("L1 fluid", attainment, 0.0)

    def fluid_allows(speed: float) -> bool:
        return fluid_bound(demand.at_speed(speed)).num_good >= attainment * len(trace)

    def on_time_allows(speed: float) -> bool:
        return on_time_bound(demand.at_speed(speed)).num_good >= attainment * len(trace)

    fluid_speed = _least_refused(fluid_allows, math.inf, tolerance)
    speed = _least_refused(on_time_allows, fluid_speed, tolerance)
    name = "L2 on-time count" if speed < fluid_speed else "L1 fluid"
    return CapacityBound(name, attainment, speed * trace.rate)


def _least_refused(allows: Callable[[float], bool], most: float, tolerance: float) -> float:
    """Return the least speed below `most` that is refused, or `most` if there is none.

    The result is at most a share of `tolerance` above the crossing.
    """
    high = most
    if math.isinf(high):
        high = next((s for s in _DOUBLINGS if not allows(s)), math.inf)
        if math.isinf(high):
            return high
    low = high / 2
    while low > _DOUBLINGS[0] / 1024 and not allows(low):
        high, low = low, low / 2
    while high > low * (1 + tolerance):
        middle = math.sqrt(low * high)
        if allows(middle):
            low = middle
        else:
            high = middle
    return high
