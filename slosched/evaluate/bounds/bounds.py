"""All bounds of a trace side by side, and what they make of a replay."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from slosched.core import LatencyModel
from slosched.evaluate.bounds.demand import demand_of
from slosched.evaluate.bounds.hindsight import hindsight_bound
from slosched.evaluate.bounds.on_time import Bound, fluid_bound, on_time_bound
from slosched.evaluate.bounds.roofline import roofline_bound, roofline_of
from slosched.kv import PrefixCaching
from slosched.perfmodel import FittedModel
from slosched.simulator.simulate import SimulationConfig
from slosched.workload.trace import Trace

_DOUBLINGS = [2.0**i for i in range(31)]


@dataclass(frozen=True, slots=True)
class Bounds:
    """No policy serves more requests of the trace well than each of these says."""

    each: tuple[Bound, ...]
    why_none_holds: str | None = None
    """What the replica does that a bound cannot follow, as noise; None if all of them hold."""

    @property
    def tightest(self) -> Bound:
        """The simplest of the lowest."""
        return min(self.each, key=lambda bound: bound.num_good)

    def ratio(self, num_good: int) -> float:
        """Share of the tightest bound that a replay of the whole trace reached.

        1 if nothing was possible.  NaN where no bound holds: a share of the wrong thing.
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
    """L1, L2 and L4 of one replica as `config` describes it: limits, deadline rule, KV cache.

    L3 as well with `hindsight`; L4 only where the model says which GPU and model it is of, and
    `roofline_of` knows them.  Some 4 s for 3,000 requests, and 3 s more for every 100 with L3.

    They are for steps that take what `model` says.  With `disturbances` in `config` they are
    still computed, as a reference, but a lucky replay could beat them: `why_none_holds` says so.
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
    return Bounds(tuple(each), why_no_bound_holds(config))


def why_no_bound_holds(config: SimulationConfig) -> str | None:
    """None if a policy's good requests may be divided by a bound; else the reason, in words."""
    if config.prefix_cache is not PrefixCaching.OFF:
        return "it counts every prompt token as work, and the prefix cache saves some"
    if config.disturbances.are_none:
        return None
    return f"the simulated steps do not take what the latency model says ({config.disturbances})"


@dataclass(frozen=True, slots=True)
class CapacityBound:
    """No policy reaches the attainment at a higher rate."""

    name: str
    attainment: float
    rate: float
    """Offered requests/s; inf if nothing bounds it, 0 if no rate is low enough."""


def capacity_bound(
    trace: Trace,
    model: LatencyModel,
    config: SimulationConfig | None = None,
    attainment: float = 0.9,
    *,
    tolerance: float = 0.01,
) -> CapacityBound:
    """The highest rate, by time compression, at which L1 and L2 leave `attainment` possible.

    L1 falls with the rate, so that it alone is a proof.  L2's crossing is found below it by
    bisection to `tolerance`, from above; a trace that is better served faster than a little slower
    would escape it, as it would escape any such search for a capacity.
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
    """`most`, or the least speed below that is not allowed, to a share of `tolerance` above it."""
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
