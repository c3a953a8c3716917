"""The profiler: which batches to measure, and how to measure them on any executor."""

from slosched.engine.profiling.measure import Progress, measure
from slosched.engine.profiling.plan import PlannedBatch, ProfileLimits, plan_batches

__all__ = ["PlannedBatch", "ProfileLimits", "Progress", "measure", "plan_batches"]
