"""A script that measures the cost of a step inside vLLM while requests come and end.

Example: `.venv-vllm/bin/python tests/inside_vllm/cost_in_traffic.py goodput`; the default policy is
`goodput+door`.  The same requests come to vLLM alone, with prompts of 64 tokens and answers of 50
to 350: once fewer than there are seats, so that hardly any waits, and once after a burst that fills
all 256 seats and leaves 1,000 waiting.
"""

from __future__ import annotations

import random
import sys
import time
from dataclasses import replace

from real_vllm import Arrival, make_request
from rich.console import Console
from rich.table import Table
from test_vllm_cost import NUM_RUNNING, NUM_WAITING, SETTINGS, Timed, make_workload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from slosched.integrations.vllm import SLOScheduler

NUM_STEPS, NUM_STEPS_BEFORE = 400, 300
PROMISED = {**SETTINGS, "slo_ttft_s": 30.0, "slo_tpot_s": 0.05}
TRAFFIC = {
    "hardly any waits": (0, 0.9),
    f"{NUM_WAITING} wait": (NUM_RUNNING + NUM_WAITING, NUM_RUNNING / 200),
}
"""Requests that come at once, and those that come before each step."""


class Clients:
    """Requests that come to one side, the same ones at each."""

    def __init__(self, num_at_once: int, num_a_step: float) -> None:
        self._rng = random.Random(5)
        self._num_a_step = num_a_step
        self._num_due: float = num_at_once
        self._num_sent = 0

    def send(self, side: Timed) -> None:
        """Add the requests that come before a step."""
        self._num_due += self._rng.expovariate(1 / self._num_a_step)
        while self._num_due >= 1:
            first = self._rng.randint(100, 40_000)
            arrival = Arrival(
                0,
                f"r{self._num_sent}",
                tuple(range(first, first + 64)),
                max_tokens=self._rng.randint(50, 350),
            )
            side.scheduler.add_request(make_request(arrival, 16, time.time()))
            self._num_due -= 1
            self._num_sent += 1


def measured(policy: str, num_at_once: int, num_a_step: float, *, is_async: bool) -> list[str]:
    """Return times of `schedule` as multiples of vLLM's own: its own too, and with the update."""
    workload = replace(make_workload(), arrivals=())
    theirs = Timed(
        AsyncScheduler if is_async else Scheduler, {}, is_async=is_async, workload=workload
    )
    ours = Timed(SLOScheduler, {"policy": policy, **PROMISED}, is_async=is_async, workload=workload)
    sides = [(side, Clients(num_at_once, num_a_step)) for side in (theirs, ours)]
    for _ in range(NUM_STEPS_BEFORE + NUM_STEPS):
        for side, clients in sides:
            clients.send(side)
            side.loop.step()

    def seconds(side: Timed, *names: str) -> float:
        return sum(sum(side.seconds[name][-NUM_STEPS:]) for name in names)

    both = ("schedule", "update_from_output")
    return [
        f"{1e3 * seconds(theirs, 'schedule') / NUM_STEPS:.2f} ms",
        f"{seconds(ours, 'schedule') / seconds(theirs, 'schedule'):.2f}",
        f"{seconds(ours, *both) / seconds(theirs, *both):.2f}",
        f"{len(ours.scheduler.running)}, {len(ours.scheduler.waiting)}",
        str(sum(ours.scheduler.truth.rejections.values())),
    ]


def main() -> None:
    policy = sys.argv[1] if len(sys.argv) > 1 else "goodput+door"
    columns = ("vLLM alone", "schedule", "with update", "running, waiting", "rejected")
    table = Table("traffic", "loop", *columns, title=f"{policy} inside vLLM, times of vLLM alone")
    for name, traffic in TRAFFIC.items():
        for is_async in (False, True):
            loop = "asynchronous" if is_async else "synchronous"
            table.add_row(name, loop, *measured(policy, *traffic, is_async=is_async))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
