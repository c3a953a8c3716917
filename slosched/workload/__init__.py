"""The load of a server: traces read from files or made up, with their rate and their SLOs."""

from slosched.workload.fetch import FetchError, cached_trace, fetch_trace
from slosched.workload.marks import (
    Adapters,
    Priorities,
    PriorityShare,
    parse_adapters,
    parse_priority,
)
from slosched.workload.named_slos import NAMED_SLOS, named_slo
from slosched.workload.public import PUBLIC_TRACES, public_trace
from slosched.workload.readers import FORMATS, read_trace, write_trace
from slosched.workload.slo import (
    Proportional,
    SLORule,
    Tiers,
    TTFTPromise,
    parse_duration,
    parse_promised,
    parse_tier,
    parse_ttft,
    seconds_of_ms,
)
from slosched.workload.synthetic import FITTED_KINDS, KINDS, synthesize
from slosched.workload.trace import Clipped, Trace, TraceError, TraceRequest

__all__ = [
    "FITTED_KINDS",
    "FORMATS",
    "KINDS",
    "NAMED_SLOS",
    "PUBLIC_TRACES",
    "Adapters",
    "Clipped",
    "FetchError",
    "Priorities",
    "PriorityShare",
    "Proportional",
    "SLORule",
    "TTFTPromise",
    "Tiers",
    "Trace",
    "TraceError",
    "TraceRequest",
    "cached_trace",
    "fetch_trace",
    "named_slo",
    "parse_adapters",
    "parse_duration",
    "parse_priority",
    "parse_promised",
    "parse_tier",
    "parse_ttft",
    "public_trace",
    "read_trace",
    "seconds_of_ms",
    "synthesize",
    "write_trace",
]
