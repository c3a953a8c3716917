"""Trace files: reads the public ones as they are published, and reads and writes slosched's own."""

from slosched.workload.readers.formats import FORMATS
from slosched.workload.readers.own import write_trace
from slosched.workload.readers.read import MADE_UP, read_trace
from slosched.workload.readers.sharegpt import TokenCounter, estimate_tokens

__all__ = ["FORMATS", "MADE_UP", "TokenCounter", "estimate_tokens", "read_trace", "write_trace"]
