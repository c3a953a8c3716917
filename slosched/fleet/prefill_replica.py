"""A prefill replica, from which requests leave with their first token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slosched.core import Request
from slosched.fleet.pooled import PooledReplica
from slosched.fleet.timeline import Timeline
from slosched.fleet.view import ReplicaKind
from slosched.simulator.simulate import SimulatedReplica

Left = Callable[[Request, "PrefillReplica"], None]


class PrefillReplica(PooledReplica):
    """A replica that computes prompts and first tokens."""

    def __init__(
        self,
        index: int,
        kind: ReplicaKind,
        simulated: SimulatedReplica,
        timeline: Timeline,
        delay_s: float,
        on_prefilled: Left,
        on_ended: Left,
    ) -> None:
        """Take over `simulated`.

        `on_prefilled` gets each request that has its first token and goes on elsewhere.  It keeps
        its KV blocks here until `free`.  `on_ended` gets each request that has ended here.
        """
        super().__init__(index, kind, simulated, timeline, delay_s)
        self._on_prefilled, self._on_ended = on_prefilled, on_ended

    def _after_step(self, ended: list[Request]) -> None:
        end_s = self.simulated.clock.now_s()
        for request in ended:
            self._timeline.add(end_s, partial(self._on_ended, request, self))
        for request in self.simulated.scheduler.queues.running.values():
            if request.num_output_tokens:
                self._timeline.add(end_s, partial(self._hand_over, request))

    def _hand_over(self, request: Request) -> None:
        self.simulated.scheduler.hand_over(request)
        self.num_in_transfer += 1
        self.note_left(request)
        self._on_prefilled(request, self)
