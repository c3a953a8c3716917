"""What is asked of the engine: traces read from files or made up, their rate and their SLOs."""

from slosched.workload.readers import FORMATS, read_trace, write_trace
from slosched.workload.slo import Proportional, SLORule, Tiers, parse_duration
from slosched.workload.synthetic import FITTED_KINDS, KINDS, synthesize
from slosched.workload.trace import Clipped, Trace, TraceError, TraceRequest

__all__ = [
    "FITTED_KINDS",
    "FORMATS",
    "KINDS",
    "Clipped",
    "Proportional",
    "SLORule",
    "Tiers",
    "Trace",
    "TraceError",
    "TraceRequest",
    "parse_duration",
    "read_trace",
    "synthesize",
    "write_trace",
]
