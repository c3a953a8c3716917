"""A trace of many millions of requests, as columns of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from slosched.core import SLO
from slosched.workload.request import TraceRequest
from slosched.workload.statistics import FloatArray, IntArray
from slosched.workload.trace import Trace


@dataclass(frozen=True)
class LongTrace:
    """Requests in order of arrival that differ only in when they arrive and how long they are.

    It takes 32 bytes a request, where a `Trace` takes several hundred.
    """

    name: str
    number: IntArray
    """The place of each request in the whole trace, of shape (n,), as are the other columns."""
    arrival_s: FloatArray
    num_prompt_tokens: IntArray
    num_output_tokens: IntArray
    slo: SLO

    @classmethod
    def of(cls, trace: Trace) -> LongTrace:
        """Return a trace as columns; raise ValueError if its requests differ in anything else."""
        slo = trace.requests[0].slo
        for r in trace.requests:
            if r != TraceRequest(
                r.request_id, r.arrival_s, r.num_prompt_tokens, r.num_output_tokens, slo
            ):
                raise ValueError(
                    f"request {r.request_id!r} of {trace.name!r} differs from the others, or has "
                    "more than an arrival, two lengths and one SLO for all, such as a tier, a "
                    "prefix, a session or a priority: no room is kept for these in a long trace"
                )
        return cls(
            trace.name,
            np.arange(len(trace)),
            trace.arrivals_s,
            trace.prompt_tokens,
            trace.output_tokens,
            slo,
        )

    @property
    def rate(self) -> float:
        """Return the mean offered rate in requests/s, as `Trace.rate` does."""
        if len(self) < 2:
            return math.nan
        duration_s = float(self.arrival_s[-1] - self.arrival_s[0])
        return (len(self) - 1) / duration_s if duration_s else math.inf

    def __len__(self) -> int:
        return len(self.number)

    def at(self, places: IntArray | slice) -> LongTrace:
        """Return the requests at these places, which must rise."""
        return replace(
            self,
            number=self.number[places],
            arrival_s=self.arrival_s[places],
            num_prompt_tokens=self.num_prompt_tokens[places],
            num_output_tokens=self.num_output_tokens[places],
        )
