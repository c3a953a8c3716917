"""The time between two steps of a server in which its device waits."""

from __future__ import annotations

from slosched.core import RequestStatus
from slosched.engine.loop import StepRecord


def waited_s(before: StepRecord, after: StepRecord) -> float | None:
    """Return how long the device waited between two consecutive steps; None if it had no work.

    The loop that plans a step, runs it and records its result waits for the host: it schedules,
    hands tokens on and takes new requests.  The loop that plans ahead waits only for what it could
    not hide.
    """
    num_ended = sum(r.status is not RequestStatus.REJECTED for r in before.ended)
    if before.num_waiting + before.num_running + before.num_swapped <= num_ended:
        return None
    return max(0.0, after.start_s - before.start_s - before.result.elapsed_s)
