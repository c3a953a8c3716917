"""A script that measures the parts of a step inside vLLM, at 256 running and 1,000 waiting requests.

Examples: `.venv-vllm/bin/python tests/inside_vllm/cost_by_part.py goodput`, and with 1,024 running
and 4,000 waiting requests `… cost_by_part.py goodput 1024 4000`; the default policy is `fcfs`.  With
a fourth number, so many requests arrive before each step, too late for their SLO: `… cost_by_part.py
fcfs:drop=expired 256 1000 8`.  The policy rejects them in its step; from vLLM alone they are taken
back after it, and a second ratio counts the time of that, too.
The times are medians over steps of this thread's processor time, in milliseconds.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from real_vllm import Arrival, make_request
from rich.console import Console
from rich.table import Table
from test_vllm_cost import (
    NUM_RUNNING,
    NUM_STEPS,
    NUM_WAITING,
    SETTINGS,
    Timed,
    make_workload,
    timed,
    times_of,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from slosched.integrations.vllm import SLOScheduler
from slosched.policy.door import MAX_JUDGED

TAKE_BACK = "finish_requests"
"""The call by which vLLM ends requests whose clients have left."""


class Parts:
    """Times of calls, by the part of the step that they belong to."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, owner: Any, method: str, label: str) -> None:
        call = getattr(owner, method)

        def run(*args: Any, **kwargs: Any) -> Any:
            begin_s = time.thread_time()
            result = call(*args, **kwargs)
            self.seconds[label].append(time.thread_time() - begin_s)
            return result

        setattr(owner, method, run)

    def median_ms(self, label: str) -> float:
        return 1e3 * statistics.median(self.seconds[label])


class Late:
    """Requests that arrive before each step, of which none can be in time any more."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._names = (f"late{index}" for index in count())

    def arrive(self, side: Timed) -> list[str]:
        """Add requests to one side, and return their names."""
        names = [next(self._names) for _ in range(self._number)]
        for name in names:
            late = Arrival(0, name, tuple(range(16)), 50, extra_args=(("slo_ttft_ms", 0.001),))
            side.scheduler.add_request(make_request(late, 16, time.time()))
        return names

    def step(self, side: Timed) -> None:
        """Make a step after they have arrived, and let the policy decide what becomes of them."""
        self.arrive(side)
        side.loop.step()
        side.seconds.setdefault(TAKE_BACK, []).append(0.0)

    def step_and_give_up(self, side: Timed) -> None:
        """Make a step after they have arrived, and take them back after it."""
        names = self.arrive(side)
        side.loop.step()
        take_back = timed(side.scheduler.finish_requests, side.seconds.setdefault(TAKE_BACK, []))
        take_back(names, RequestStatus.FINISHED_ABORTED)


def by_part(ours: Timed, step: Callable[[Timed], None]) -> dict[str, float]:
    """Return the parts of one step of slosched's scheduler, including vLLM's own."""
    parts, driver = Parts(), ours.scheduler._link
    parts.time(driver._mirror, "refresh", "read vLLM's queues")
    parts.time(driver._policy, "schedule", "the policy")
    parts.time(driver._grouped, "plan", "the policy")
    parts.time(driver, "_checked", "checked")
    parts.time(driver, "schedule", "schedule")
    parts.time(driver._mirror, "note_tokens", "stamp the tokens (in update_from_output)")
    carry_out = driver._carry_out

    def carried(plan: Any, vllm_schedule: Any) -> Any:
        host = type("Host", (), {"schedule": staticmethod(vllm_schedule)})()
        parts.time(host, "schedule", "vLLM's schedule")
        return carry_out(plan, host.schedule)

    driver._carry_out = carried
    for _ in range(NUM_STEPS):
        step(ours)
    found = {label: parts.median_ms(label) for label in parts.seconds}
    found["check the plan"] = found.pop("checked") - found["the policy"]
    counted = ("read vLLM's queues", "the policy", "check the plan", "vLLM's schedule")
    found["hand it to vLLM, compare"] = found["schedule"] - sum(found[label] for label in counted)
    return found


def main() -> None:
    policy = sys.argv[1] if len(sys.argv) > 1 else "fcfs"
    num_running, num_waiting = map(int, sys.argv[2:4] or (NUM_RUNNING, NUM_WAITING))
    late = Late(int(sys.argv[4]) if len(sys.argv) > 4 else 0)
    table = Table("ms", "synchronous", "asynchronous", title=f"{policy} inside vLLM")
    columns: list[dict[str, float]] = []
    for is_async in (False, True):
        workload = make_workload(num_running, num_waiting)
        side = partial(Timed, is_async=is_async, workload=workload)
        theirs = side(AsyncScheduler if is_async else Scheduler, {})
        ours = side(SLOScheduler, {"policy": policy, **SETTINGS})
        # A door judges first those that came at once.
        num_judging = -(-num_waiting // MAX_JUDGED)
        for _ in range(num_judging + NUM_STEPS + 5):
            late.step_and_give_up(theirs)
            late.step(ours)
        column = {
            "schedule, times that of vLLM alone": times_of(ours, theirs, "schedule"),
            "the same, with what takes them back": times_of(ours, theirs, "schedule", TAKE_BACK),
            "schedule of vLLM alone": 1e3 * theirs.median_s("schedule"),
            "update_from_output of vLLM alone": 1e3 * theirs.median_s("update_from_output"),
        }
        columns.append(column | by_part(ours, late.step))
    for label in columns[0]:
        table.add_row(label, *(f"{column[label]:.2f}" for column in columns))
    Console().print(table)


if __name__ == "__main__":
    main()
