"""Requests that arrive on time, however far the engine is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from slosched.core import Request
from slosched.engine.loop import Engine
from slosched.simulator.clients import Clients
from slosched.simulator.simulated import VirtualClock


def play_open_loop(
    requests: Sequence[Request],
    enter_s: Sequence[float],
    engine: Engine,
    clients: Clients,
    clock: VirtualClock,
    run_some: Callable[[float], None],
) -> None:
    """Serve `requests` until every one of them has ended; each enters at its time in `enter_s`.

    These times never decrease.  A client that sent its request during a step may have left before
    the step ended.  `run_some` runs at least one step and is told when the next request
    enters.
    """
    num_entered = 0
    while num_entered < len(requests) or engine.has_work:
        if not engine.has_work:
            clock.advance_to(enter_s[num_entered])
        now_s = clock.now_s()
        while num_entered < len(requests) and enter_s[num_entered] <= now_s:
            clients.send(requests[num_entered])
            num_entered += 1
        clients.leave(now_s)
        run_some(enter_s[num_entered] if num_entered < len(requests) else math.inf)
