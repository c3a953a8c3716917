"""The cost of a decision inside vLLM, relative to vLLM's own, at 256 running and 1,000 waiting
requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Arrival, Loop, Workload, make_config, make_request, make_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from slosched.integrations.vllm import SLOScheduler

NUM_RUNNING, NUM_WAITING = 256, 1000
NUM_STEPS = 60
MOST = 1.4
"""The limit as a multiple of vLLM's own time."""

SETTINGS = {
    "profile": "h100/llama-3.1-8b",
    "any_device": True,
    "slo_ttft_s": 100,
    "slo_tpot_s": 1,
}
"""An SLO that every request can meet, so that no queue gets shorter."""


def make_workload(num_running: int = NUM_RUNNING, num_waiting: int = NUM_WAITING) -> Workload:
    """Return requests that arrive at once, with prompts that fit into one step, so that only
    decodes follow.  The KV cache has room for all that run, whatever their number."""
    arrivals = tuple(
        Arrival(0, f"r{i}", tuple(range(100 + i, 116 + i)), max_tokens=500)
        for i in range(num_running + num_waiting)
    )
    return Workload(
        seed=1,
        arrivals=arrivals,
        num_blocks=80 * num_running,
        block_size=16,
        max_num_batched_tokens=8192,
        max_num_seqs=num_running,
        max_model_len=1024,
        stop_chance=0.0,
    )


class Timed:
    """A loop whose scheduler's decisions are timed, in processor time."""

    def __init__(
        self,
        scheduler_class: Any,
        settings: dict[str, Any],
        *,
        is_async: bool,
        workload: Workload | None = None,
    ) -> None:
        workload = workload or make_workload()
        config = make_config(workload, is_async=is_async, settings=settings)
        self.scheduler = make_scheduler(scheduler_class, config)
        self.seconds: dict[str, list[float]] = {"schedule": [], "update_from_output": []}
        for name, times in self.seconds.items():
            setattr(self.scheduler, name, timed(getattr(self.scheduler, name), times))
        self.loop = Loop(self.scheduler, workload, is_async, arrival_s=time.time())
        for arrival in workload.arrivals:
            self.scheduler.add_request(make_request(arrival, workload.block_size, time.time()))

    def median_s(self, name: str) -> float:
        return statistics.median(self.seconds[name][-NUM_STEPS:])


def times_of(ours: Timed, theirs: Timed, *names: str) -> float:
    """Return the median ratio of steps taken in turns, so that both had the same machine speed."""
    own, others = (
        [
            sum(step)
            for step in zip(*(side.seconds[name][-NUM_STEPS:] for name in names), strict=True)
        ]
        for side in (ours, theirs)
    )
    return statistics.median(one / other for one, other in zip(own, others, strict=True))


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        begin_s = time.process_time()
        result = call(*args, **kwargs)
        times.append(time.process_time() - begin_s)
        return result

    return run


@pytest.mark.parametrize("policy", ["fcfs", "slo_aware", "goodput"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_decision_costs_little_more_than_vllms_own(
    policy: str, is_async: bool, record_property: Callable[[str, object], None]
) -> None:
    theirs = Timed(AsyncScheduler if is_async else Scheduler, {}, is_async=is_async)
    ours = Timed(SLOScheduler, {"policy": policy, **SETTINGS}, is_async=is_async)
    for _ in range(NUM_STEPS + 5):  # in turns, so that a slow second affects both
        theirs.loop.step()
        ours.loop.step()
    for side in (theirs, ours):
        assert len(side.scheduler.running) == NUM_RUNNING
        assert len(side.scheduler.waiting) == NUM_WAITING
    assert ours.scheduler.truth.num_steps == NUM_STEPS + 5
    assert not ours.scheduler.truth.fallbacks
    for name in ("schedule", "update_from_output"):
        record_property(f"{name}_ms", [1e3 * side.median_s(name) for side in (theirs, ours)])
    ratio = times_of(ours, theirs, "schedule")
    record_property("ratio", ratio)
    record_property("ratio_with_update", times_of(ours, theirs, "schedule", "update_from_output"))
    assert ratio < MOST
