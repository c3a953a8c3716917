"""A replay in which rejected clients come again when they are told to."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import replace

from slosched.core import Request, RequestStatus
from slosched.engine.loop import Engine
from slosched.kv import KVCache
from slosched.perfmodel import FittedModel, OnlineModel
from slosched.policy import Door
from slosched.scheduler import Scheduler
from slosched.simulator.simulate import SimulationConfig
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock

SECOND = "again-"
"""Beginning of the ids of second tries."""


class ObedientClients:
    """Clients that come once more, after the whole seconds of `Retry-After`, if rejected."""

    def __init__(
        self,
        door: Door,
        model: FittedModel,
        config: SimulationConfig,
        num_output_tokens: dict[str, int],
    ) -> None:
        """Begin with an empty replica; output lengths are by request id, for first tries."""
        self._door, self._model = door, OnlineModel(model)
        self._clock = VirtualClock()
        kv = KVCache(config.num_blocks, config.block_size)
        again = {SECOND + name: num for name, num in num_output_tokens.items()}
        device = SimulatedExecutor(
            model, self._clock, {**num_output_tokens, **again}, config.disturbances, config.seed
        )
        self._engine = Engine(Scheduler(door, kv, config.limits, self._model), device, self._clock)
        self._coming: list[tuple[float, str, Request]] = []
        self.second_tries: list[Request] = []
        self.waits_s: list[float] = []
        """Times from the answer to the first try until the second one."""

    def play(self, requests: Iterable[Request]) -> None:
        """Serve `requests` and the second tries of those that are rejected."""
        self._coming = [(r.arrival_s, r.request_id, r) for r in requests]
        heapq.heapify(self._coming)
        while self._coming or self._engine.has_work:
            if not self._engine.has_work:
                self._clock.advance_to(self._coming[0][0])
            while self._coming and self._coming[0][0] <= self._clock.now_s():
                self._arrive(heapq.heappop(self._coming)[2])
            ended = self._engine.take_ended()
            if self._engine.has_work:
                ended = [*ended, *self._engine.step().ended]
            for request in ended:
                if request.status is RequestStatus.REJECTED:
                    self._come_again(request)

    def _arrive(self, request: Request) -> None:
        scheduler = self._engine.scheduler
        refusal = scheduler.judge(request)
        scheduler.queue(request, refusal)
        if refusal is not None and refusal.retry_after_s is not None:
            self._plan_second_try(request, request.arrival_s, refusal.retry_after_s)

    def _come_again(self, request: Request) -> None:
        """Plan the second try of a request that was rejected after it had waited."""
        if request.end_s is None or request.end_s == request.arrival_s:
            return  # it was refused on arrival and knows already
        as_new = replace(request, arrival_s=request.end_s)
        wait_s = self._door.retry_after_s(as_new, self._model)
        self._plan_second_try(request, request.end_s, wait_s)

    def _plan_second_try(self, first: Request, told_s: float, retry_after_s: float) -> None:
        if first.request_id.startswith(SECOND):
            return
        wait_s = max(1, math.ceil(retry_after_s))
        self.waits_s.append(wait_s)
        second = Request(
            SECOND + first.request_id,
            told_s + wait_s,
            first.num_prompt_tokens,
            first.max_tokens,
            first.slo,
        )
        self.second_tries.append(second)
        heapq.heappush(self._coming, (second.arrival_s, second.request_id, second))
