"""What is asked of the engine: traces read from files or made up, their rate and their SLOs."""

from slosched.workload.fetch import FetchError, cached_trace, fetch_trace
from slosched.workload.public import PUBLIC_TRACES
from slosched.workload.readers import FORMATS, read_trace, write_trace
from slosched.workload.slo import Proportional, SLORule, Tiers, parse_duration
from slosched.workload.synthetic import FITTED_KINDS, KINDS, synthesize
from slosched.workload.trace import Clipped, Trace, TraceError, TraceRequest

__all__ = [
    "FITTED_KINDS",
    "FORMATS",
    "KINDS",
    "PUBLIC_TRACES",
    "Clipped",
    "FetchError",
    "Proportional",
    "SLORule",
    "Tiers",
    "Trace",
    "TraceError",
    "TraceRequest",
    "cached_trace",
    "fetch_trace",
    "parse_duration",
    "read_trace",
    "synthesize",
    "write_trace",
]
