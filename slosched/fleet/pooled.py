"""A replica of a prefill or decode pool, as its fleet and its router see it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from heapq import heappush

from slosched.core import Request, StalledError
from slosched.fleet.timeline import Timeline
from slosched.fleet.view import ReplicaKind, ReplicaView
from slosched.simulator.simulate import SimulatedReplica


class PooledReplica(ReplicaView, ABC):
    """A replica that is simulated step by step, since other replicas wait for its results."""

    def __init__(
        self,
        index: int,
        kind: ReplicaKind,
        simulated: SimulatedReplica,
        timeline: Timeline,
        delay_s: float,
    ) -> None:
        super().__init__(index, kind, simulated, timeline.clock, delay_s)
        self.num_in_transfer = 0
        """Requests that hold KV blocks here and are in none of the scheduler's queues."""
        self._timeline = timeline
        self._wakes_s = math.inf
        """Time of the next step that the timeline knows of."""

    def send(self, request: Request) -> None:
        """Send it a request; only the fleet does this."""
        super().send(request)
        self.wake()

    def refuse(self, request: Request) -> None:
        """Let the scheduler reject a request that fits into no replica, past all queues."""
        PooledReplica.send(self, request)

    def free(self, request: Request) -> None:
        """Give back the KV blocks of a request that is in none of the scheduler's queues."""
        self.simulated.scheduler.kv.forget(request.request_id)
        self.num_in_transfer -= 1
        self.wake()

    def note_left(self, request: Request) -> None:
        """Count a request that goes on, or has ended, elsewhere as ended here."""
        now_s = self._clock.now_s()
        heappush(self._ended, (now_s, request.request_id, request))
        self._changes_s = min(self._changes_s, now_s)

    def wake(self) -> None:
        """Let the timeline run the next step, if there is one."""
        simulated = self.simulated
        next_s = max(simulated.known_until_s, simulated.clock.now_s(), self._clock.now_s())
        if next_s < self._wakes_s:
            self._wakes_s = next_s
            self._timeline.add(next_s, self._step, is_step=True)

    def _simulate(self, until_s: float) -> None:
        """Do nothing: all steps that begin before the time on the clock have been simulated."""

    def _steps_until_s(self) -> float:
        """Return the time before which the next steps have to begin: here, only one begins."""
        return math.nextafter(self._clock.now_s(), math.inf)

    def _step(self) -> None:
        now_s = self._clock.now_s()
        if now_s != self._wakes_s:
            return  # an earlier step was run in its place
        self._wakes_s = math.inf
        if self.simulated.engine.has_work:  # it may have waited for KV blocks
            self.simulated.clock.advance_to(now_s)
        try:
            self.simulated.run(self._steps_until_s())
        except StalledError:
            if not self.num_in_transfer:
                raise
            return  # `free` wakes it
        self._after_step(self._take_ended())
        self.wake()

    @abstractmethod
    def _after_step(self, ended: list[Request]) -> None:
        """React to the end of a step in which the requests of `ended` have ended.

        The time on the timeline's clock is that of the step's begin.
        """
