"""The future of sessions, for orders of eviction that know it."""

from __future__ import annotations

import math

from slosched.core import Request, RequestStatus
from slosched.kv.eviction.order import KnownReturn
from slosched.workload.request import TraceRequest
from slosched.workload.trace import Trace


def known_returns(trace: Trace) -> KnownReturn | None:
    """Return what gives the arrival of the turn after a request that has ended, in seconds.

    It is inf after the last turn of a session, and in a closed loop after one that did not finish.
    Return None for a trace without sessions.
    """
    followers: dict[str, TraceRequest] = {}
    last: dict[str, TraceRequest] = {}
    for row in trace.requests:
        if row.session_id is None:
            continue
        before = last.get(row.session_id)
        if before is not None:
            followers[before.request_id] = row
        last[row.session_id] = row
    if not last:
        return None

    def return_s(request: Request) -> float:
        follower = followers.get(request.request_id)
        if follower is None:
            return math.inf
        if follower.think_s is None:
            return follower.arrival_s
        assert request.end_s is not None
        finished = request.status is RequestStatus.FINISHED
        return request.end_s + follower.think_s if finished else math.inf

    return return_s
