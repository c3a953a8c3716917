"""Requests that arrive on time, however far the engine is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from slosched.core import Request
from slosched.engine.loop import Engine
from slosched.simulator.clients import Clients
from slosched.simulator.simulated import VirtualClock


class OpenLoop:
    """Serves requests that enter at their own times; it can be run bit by bit.

    A client that sent its request during a step may have left before the step ended.  `run_some`
    runs at least one step, and is told until when no request enters.
    """

    def __init__(
        self,
        engine: Engine,
        clients: Clients,
        clock: VirtualClock,
        run_some: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._clients = clients
        self._clock = clock
        self._run_some = run_some
        self.entering: deque[tuple[float, Request]] = deque()
        """Requests that have not reached the engine, and when each one does."""

    def add(self, request: Request, enter_s: float) -> None:
        """Let a request enter at `enter_s`, no earlier than all that were added before it."""
        self.entering.append((enter_s, request))

    def run(self, until_s: float = math.inf) -> None:
        """Run all steps that begin before `until_s`; by default, until every request has ended.

        Nothing may be added later that enters before `until_s`.
        """
        while self.run_once(until_s):
            pass

    def run_once(self, until_s: float) -> bool:
        """Run at least one step; return False if none begins before `until_s`."""
        engine, clock, entering = self._engine, self._clock, self.entering
        if not (entering or engine.has_work):
            return False
        if not engine.has_work:
            clock.advance_to(min(entering[0][0], until_s))
        now_s = clock.now_s()
        if now_s >= until_s:
            return False
        while entering and entering[0][0] <= now_s:
            self._clients.send(entering.popleft()[1])
        self._clients.leave(now_s)
        self._run_some(min(entering[0][0], until_s) if entering else until_s)
        return True
