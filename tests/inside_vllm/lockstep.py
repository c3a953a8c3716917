"""slosched's scheduler class against vLLM's own on one workload, call by call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from real_vllm import Loop, Step, Workload, make_scheduler
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from slosched.integrations.vllm import SLOScheduler


class Compared(NamedTuple):
    """What both sides did, and the schedulers after it."""

    steps: list[Step]
    theirs: Any
    ours: Any

    @property
    def counts(self) -> dict[str, int]:
        """Return how much happened."""
        return {
            "calls": len(self.steps),
            "preemptions": sum(len(step.preempted) for step in self.steps),
            "outputs": sum(len(step.outputs) for step in self.steps),
        }


def check_lockstep(
    workload: Workload,
    config: Callable[..., Any],
    *,
    is_async: bool,
    policy: str = "fcfs",
    make: Callable[[Any, Any], Any] = make_scheduler,
    changed_by: tuple[type, ...] = (),
) -> Compared:
    """Run the workload under both schedulers; raise AssertionError where they differ.

    They differ if a call of one has another plan, other queues, free blocks or outputs than that of
    the other, or if vLLM did not carry out a plan of slosched's.  `config` returns vLLM's
    configuration with slosched's `settings`, or without any for vLLM's own side; `make` returns a
    scheduler of a class and a configuration.  Methods of `changed_by` go before those of vLLM's
    class.
    """
    configs = config(settings=None), config(settings={"policy": policy})
    plans_ahead = configs[0].scheduler_config.async_scheduling
    base = AsyncScheduler if plans_ahead else Scheduler
    theirs = make(type(base.__name__, (*changed_by, base), {}), configs[0])
    ours = make(SLOScheduler, configs[1])
    assert isinstance(ours, AsyncScheduler) is plans_ahead
    expected, found = (Loop(each, workload, is_async).run() for each in (theirs, ours))
    for call, (left, right) in enumerate(zip(expected, found, strict=True)):
        assert right == left, f"seed {workload.seed}, call {call}"
    assert not ours.truth.fallbacks, f"seed {workload.seed}"
    assert not ours.truth.divergences, f"seed {workload.seed}"
    return Compared(expected, theirs, ours)
