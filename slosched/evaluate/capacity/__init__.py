"""The highest rate that a policy serves well, with its interval, and the search for it."""

from slosched.evaluate.capacity.measured import PRECISION, TARGETS, Contender, Measured, Plan
from slosched.evaluate.capacity.outcomes import Outcomes
from slosched.evaluate.capacity.point import Bench, CapacityError, Point
from slosched.evaluate.capacity.pool import MakePool, local_pool
from slosched.evaluate.capacity.results import Capacity, Flag, Ratio, Study
from slosched.evaluate.capacity.store import Store
from slosched.evaluate.capacity.sweep import Sweep, busy_rate
from slosched.evaluate.capacity.windows import check_rate_of, window

__all__ = [
    "PRECISION",
    "TARGETS",
    "Bench",
    "Capacity",
    "CapacityError",
    "Contender",
    "Flag",
    "MakePool",
    "Measured",
    "Outcomes",
    "Plan",
    "Point",
    "Ratio",
    "Store",
    "Study",
    "Sweep",
    "busy_rate",
    "check_rate_of",
    "local_pool",
    "window",
]
