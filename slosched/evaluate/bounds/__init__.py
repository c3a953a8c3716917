"""How many requests of a trace any scheduler at all could have served well."""

from slosched.evaluate.bounds.demand import Demand, demand_of
from slosched.evaluate.bounds.on_time import Bound, fluid_bound, on_time_bound
from slosched.evaluate.bounds.prices import StepPrices, step_prices

__all__ = [
    "Bound",
    "Demand",
    "StepPrices",
    "demand_of",
    "fluid_bound",
    "on_time_bound",
    "step_prices",
]
