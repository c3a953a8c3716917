"""How many requests of a trace any scheduler at all could have served well."""

from slosched.evaluate.bounds.bounds import (
    Bounds,
    CapacityBound,
    bounds_of,
    capacity_bound,
    why_no_bound_holds,
)
from slosched.evaluate.bounds.demand import Demand, demand_of
from slosched.evaluate.bounds.on_time import Bound, fluid_bound, on_time_bound
from slosched.evaluate.bounds.prices import LegalSteps, StepPrices

__all__ = [
    "Bound",
    "Bounds",
    "CapacityBound",
    "Demand",
    "LegalSteps",
    "StepPrices",
    "bounds_of",
    "capacity_bound",
    "demand_of",
    "fluid_bound",
    "on_time_bound",
    "why_no_bound_holds",
]
