"""A trace of many millions of requests, as columns of numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from slosched.core import SLO
from slosched.workload.statistics import FloatArray, IntArray


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
