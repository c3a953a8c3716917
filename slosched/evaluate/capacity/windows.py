"""Parts of a trace, one for each seed, and the blocks in which requests are resampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from slosched.workload.trace import Trace, TraceError

BLOCK_S = 60.0
"""The length of a block, in the trace's own time."""
MIN_BLOCKS = 8
"""The least number of blocks; a shorter trace is cut finer, so that resampling is possible."""


def window(trace: Trace, num_requests: int, seed: int) -> Trace:
    """Return the `seed`-th run of `num_requests` requests, moved to begin at 0.

    After its end the trace begins again, so windows of different seeds share no request until the
    whole trace has been used once.  Raises TraceError for more requests than the trace has.
    """
    if num_requests > len(trace):
        raise TraceError(
            f"trace {trace.name!r} has {len(trace)} requests, a window of {num_requests} cannot "
            "be cut from it: ask for fewer with -n"
        )
    start = seed * num_requests % len(trace)
    period_s = trace.duration_s + (1 / trace.rate if 0 < trace.rate < np.inf else 0.0)
    first, beyond = trace.requests[start : start + num_requests], start + num_requests - len(trace)
    again = trace.requests[: max(0, beyond)]
    chosen = (*first, *(replace(r, arrival_s=r.arrival_s + period_s) for r in again))
    origin = {**trace.provenance, "window_start": start}
    return Trace.of(chosen, trace.name, origin, trace.prefix_block_tokens)


def check_rate_of(part: Trace, mend: str) -> None:
    """Raise TraceError, which ends in `mend`, unless a window has a rate, so that it can be played.

    A replay at a rate stretches the times of the arrivals, which needs two that differ.
    """
    try:
        part.own_rate()
    except TraceError as error:
        first = int(part.provenance["window_start"]) + 1
        raise TraceError(f"{error} in the window from request {first} on; {mend}") from None


def blocks_of(trace: Trace) -> npt.NDArray[np.int64]:
    """Return the block of each request, shape (n,), the same at any rate of a replay."""
    block_s = min(BLOCK_S, trace.duration_s / MIN_BLOCKS) or BLOCK_S
    last = max(0, int(np.ceil(trace.duration_s / block_s)) - 1)
    return np.minimum(trace.arrivals_s // block_s, last).astype(np.int64)
