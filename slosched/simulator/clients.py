"""Clients of a simulated server that disconnect when their answer takes too long."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from slosched.core import EndReason, Executor, Request, ScheduledBatch, StepResult
from slosched.scheduler import Scheduler
from slosched.simulator.simulated import VirtualClock


class Clients:
    """The clients of a replay, each of which waits `timeout_s` from arrival for its whole answer.

    A client may leave in the middle of a step.  Then the step runs to its end, but its token
    reaches nobody: the request is aborted before the step's results are recorded.  A replica that
    fails at `fails_s` loses all of its clients at that time, in the same way.
    """

    def __init__(
        self, scheduler: Scheduler, timeout_s: float | None = None, fails_s: float = math.inf
    ) -> None:
        """Wait without end if `timeout_s` is None; raise ValueError if it is not positive."""
        if timeout_s is not None and not timeout_s > 0:
            raise ValueError(f"a client's timeout must be positive, not {timeout_s!r} s")
        self._scheduler = scheduler
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._fails_s = fails_s
        self._waiting: list[tuple[float, int, Request]] = []
        """Heap of the time at which a client leaves, the number of earlier ones, its request.

        It has none of clients that wait without end."""
        self._num_sent = 0
        self.next_s = math.inf
        """The time before which no client leaves."""

    def send(self, request: Request) -> None:
        """Hand a request to the scheduler; its client waits for it from its arrival on."""
        self._scheduler.add_request(request)
        self.watch(request)

    def watch(self, request: Request) -> None:
        """Let the client of a request leave in time that the scheduler has already."""
        leaves_s = self._leaves_s(request)
        if leaves_s == math.inf:
            return
        heappush(self._waiting, (leaves_s, self._num_sent, request))
        self._num_sent += 1
        self.next_s = self._waiting[0][0]

    def leaving(self, now_s: float) -> list[Request]:
        """Return the unfinished requests whose clients have left by `now_s`, each once."""
        waiting, gone = self._waiting, []
        while self.next_s <= now_s:
            _, _, request = heappop(waiting)
            self.next_s = waiting[0][0] if waiting else math.inf
            if not request.status.is_ended:
                gone.append(request)
        return gone

    def abort(self, request: Request) -> None:
        """End the request of a client that has left, at the time when it left."""
        leaves_s = self._leaves_s(request)
        reason = EndReason.CLIENT if leaves_s < self._fails_s else EndReason.FAULT
        self._scheduler.end(request.request_id, reason, leaves_s)

    def leave(self, now_s: float) -> None:
        """Abort all requests whose clients have left by `now_s`."""
        for request in self.leaving(now_s):
            self.abort(request)

    def _leaves_s(self, request: Request) -> float:
        return min(request.arrival_s + self._timeout_s, self._fails_s)


class WatchedByClients:
    """An executor during whose steps clients leave; `Scheduler.update` drops their tokens."""

    def __init__(self, executor: Executor, clock: VirtualClock, clients: Clients) -> None:
        """Wrap an executor whose steps let time pass on `clock`."""
        self._executor = executor
        self._clock = clock
        self._clients = clients

    def execute(self, batch: ScheduledBatch) -> StepResult:
        result = self._executor.execute(batch)
        self._clients.leave(self._clock.now_s())
        return result

    def release(self, request_id: str) -> None:
        self._executor.release(request_id)
