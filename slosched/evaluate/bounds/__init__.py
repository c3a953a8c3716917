"""Upper bounds on the requests of a trace that any scheduler could serve well."""

from slosched.evaluate.bounds.bounds import (
    Bounds,
    CapacityBound,
    bounds_of,
    capacity_bound,
    fleet_bounds,
    fleet_demand,
    why_no_bound_holds,
    why_no_fleet_bound_holds,
)
from slosched.evaluate.bounds.demand import Demand, demand_of
from slosched.evaluate.bounds.hindsight import hindsight_bound
from slosched.evaluate.bounds.on_time import Bound, fluid_bound, on_time_bound
from slosched.evaluate.bounds.pace import Pace
from slosched.evaluate.bounds.prices import LegalSteps, StepPrices
from slosched.evaluate.bounds.roofline import Roofline, roofline_bound, roofline_of

__all__ = [
    "Bound",
    "Bounds",
    "CapacityBound",
    "Demand",
    "LegalSteps",
    "Pace",
    "Roofline",
    "StepPrices",
    "bounds_of",
    "capacity_bound",
    "demand_of",
    "fleet_bounds",
    "fleet_demand",
    "fluid_bound",
    "hindsight_bound",
    "on_time_bound",
    "roofline_bound",
    "roofline_of",
    "why_no_bound_holds",
    "why_no_fleet_bound_holds",
]
