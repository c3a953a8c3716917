"""Sessions in a closed loop: the next turn arrives a while after the turn before it has ended."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from slosched.core import EndReason, Request, RequestStatus
from slosched.workload.trace import Trace


class Steps(Protocol):
    """A replica as the loop needs it: `simulate.SimulatedReplica`."""

    @property
    def known_until_s(self) -> float:
        """Return the time up to which it has been simulated, if nothing more is sent to it."""

    def run_until_end(self, until_s: float) -> list[Request]:
        """Run steps that begin before `until_s` until one ends requests, and return these."""

    def add(self, request: Request) -> None:
        """Send it a request, at the request's own arrival."""


class Turns:
    """The requests of a trace that are yet to arrive, some of them only after others have ended.

    A turn that did not finish breaks its session: the later turns are never sent, and end as
    aborted by their client at the time of the break.
    """

    def __init__(self, trace: Trace, requests: Sequence[Request]) -> None:
        """Begin with all `requests`, which are those of `trace`, in its order.

        A turn with `think_s` waits for the last turn of its session before it in the trace.
        Without one it arrives at its own time.
        """
        self._to_come: list[tuple[float, int, Request]] = []
        """Heap of the requests whose arrival is known, with a number that breaks ties."""
        self._next: dict[str, tuple[Request, float]] = {}
        """For each turn that another one waits for: that one, and the time between the two."""
        last: dict[str, Request] = {}
        for place, (row, request) in enumerate(zip(trace.requests, requests, strict=True)):
            name = row.session_id
            before = None if name is None or row.think_s is None else last.get(name)
            if name is not None:
                last[name] = request
            if before is None or row.think_s is None:
                self._to_come.append((request.arrival_s, place, request))
            else:
                self._next[before.request_id] = request, row.think_s
        self._num_sent = len(requests)
        heapify(self._to_come)

    @property
    def next_s(self) -> float:
        """Return when the next request arrives that is known to; inf if there is none."""
        return self._to_come[0][0] if self._to_come else math.inf

    def take(self) -> Request:
        """Return the next request that arrives, and count it as having arrived."""
        return heappop(self._to_come)[2]

    def note_ended(self, request: Request) -> None:
        """Let what waits for the request arrive after its time, or never if it did not finish."""
        while request.request_id in self._next:
            follower, think_s = self._next.pop(request.request_id)
            assert request.end_s is not None
            if request.status is RequestStatus.FINISHED:
                follower.arrival_s = request.end_s + think_s
                self._num_sent += 1
                heappush(self._to_come, (follower.arrival_s, self._num_sent, follower))
                return
            follower.arrival_s = follower.end_s = request.end_s
            follower.status, follower.end_reason = RequestStatus.ABORTED, EndReason.CLIENT
            request = follower


def run_some(replicas: Iterable[Steps], turns: Turns, until_s: float) -> bool:
    """Run the replica that lags behind; return False if none has a step that begins earlier.

    It runs until it would overtake another one, `until_s`, or the end of a request.  So whatever
    that end sets off can still reach any replica in time.  What becomes of a request that a replica
    has lost, which ends there as a fault, is for its fleet to say.
    """
    lagging, lagging_s, others_s = None, math.inf, math.inf
    for replica in replicas:
        known_s = replica.known_until_s
        if known_s < lagging_s:
            lagging, lagging_s, others_s = replica, known_s, lagging_s
        else:
            others_s = min(others_s, known_s)
    if lagging is None or lagging_s >= until_s:
        return False
    # The smallest time more lets one of several replicas go on that are equally far.
    for request in lagging.run_until_end(min(until_s, math.nextafter(others_s, math.inf))):
        if request.end_reason is not EndReason.FAULT:
            turns.note_ended(request)
    return True


def play(replica: Steps, turns: Turns) -> None:
    """Run one replica until all turns have ended."""
    while True:
        if run_some((replica,), turns, turns.next_s):
            continue
        if turns.next_s == math.inf:
            return
        replica.add(turns.take())


def in_order(requests: Iterable[Request]) -> list[Request]:
    """Return the requests in the order in which they arrived."""
    return sorted(requests, key=lambda request: request.arrival_s)
