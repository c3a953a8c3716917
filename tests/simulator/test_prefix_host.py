"""The prefix cache's copies in host memory: their cost in a step, and what a fault does to them."""

from __future__ import annotations

import pytest
from factories import make_model

from slosched.core import Limits, Request, RequestStatus, ScheduledBatch, StepResult
from slosched.engine.checked_memory import CheckedMemory
from slosched.engine.loop import Engine, StepRecord
from slosched.kv import HashIndex, HostWrites, KVCache, PrefixCaching, PrefixHost
from slosched.policy import FCFS
from slosched.scheduler import Scheduler
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.workload import Trace, TraceRequest

A, B = (1, 2, 3, 4), (5, 6, 7, 8)
"""Two prompts of 40 tokens, or 10 KV blocks of 4; the cache holds one and 3 tokens more."""


def steps_of(writes: HostWrites, caching: PrefixCaching) -> list[StepRecord]:
    """Return the steps of a replay of A, B, and A again."""
    lines = [
        TraceRequest(f"r{i}", float(i), 41, 3, prefix_hashes=hashes)
        for i, hashes in enumerate((A, B, A))
    ]
    config = SimulationConfig(
        num_blocks=11, block_size=4, prefix_cache=caching, prefix_host=PrefixHost(40, writes)
    )
    steps: list[StepRecord] = []
    trace = Trace.of(lines, "test", prefix_block_tokens=10)
    simulate(trace, FCFS(), make_model(), config, on_step=steps.append)
    return steps


@pytest.mark.parametrize("caching", [PrefixCaching.HASH, PrefixCaching.RADIX])
def test_copies_of_a_hit_are_planned_and_paid_for(caching: PrefixCaching) -> None:
    prompts = [s for s in steps_of(HostWrites.BACK, caching) if s.batch.shape.num_prefills]
    prompts += [s for s in steps_of(HostWrites.BACK, caching) if s.batch.swap_in]
    _, second, third = (step.batch for step in prompts)
    assert (len(second.swap_out), len(second.swap_in)) == (10, 0)
    assert (len(third.swap_out), len(third.swap_in)) == (10, 10)
    [chunk] = third.chunks
    assert (chunk.num_new_tokens, chunk.num_prior_tokens) == (1, 40)
    planned = third.output.shape
    assert planned is not None
    assert planned.num_swapped_blocks == 10  # the plan does not know of writes that make room
    assert third.shape.num_swapped_blocks == 20
    assert prompts[2].result.elapsed_s == make_model().predict(third.shape)
    assert make_model().predict(third.shape) > make_model().predict(planned)


def test_writing_through_copies_each_block_once_and_none_for_room() -> None:
    steps = steps_of(HostWrites.THROUGH, PrefixCaching.RADIX)
    out = [len(step.batch.swap_out) for step in steps]
    # A prompt's blocks are written in the step after it; the second A's blocks are there already.
    assert out == [0, 10, 0, 0, 10, 0, 0, 0, 0]
    assert [len(step.batch.swap_in) for step in steps] == [0] * 6 + [10, 0, 0]


class Fails(SimulatedExecutor):
    """Executes nothing of a step that fails."""

    fails = False

    def execute(self, batch: ScheduledBatch) -> StepResult:
        if self.fails:
            self.fails = False
            raise RuntimeError("the device is gone")
        return super().execute(batch)


class FailsFirst(CheckedMemory):
    """Leaves its memory untouched when a step fails."""

    def __init__(self, executor: Fails) -> None:
        super().__init__(executor, block_size=4)
        self._fails = executor

    def execute(self, batch: ScheduledBatch) -> StepResult:
        if self._fails.fails:
            return self._fails.execute(batch)
        return super().execute(batch)


def test_after_a_fault_nothing_on_the_host_is_trusted() -> None:
    clock = VirtualClock()
    executor = Fails(make_model(), clock, {})
    kv = KVCache(11, 4, 0, HashIndex(), PrefixHost(40))
    scheduler = Scheduler(FCFS(), kv, Limits(), make_model())
    engine = Engine(scheduler, FailsFirst(executor), clock)
    names = iter(range(99))

    def ask(hashes: tuple[int, ...], *, fails: bool = False) -> Request:
        at_s = clock.now_s()
        request = Request(
            f"r{next(names)}", at_s, 41, 3, prefix_hashes=hashes, prefix_block_tokens=10
        )
        scheduler.add_request(request)
        executor.fails = fails
        while engine.has_work:
            try:
                engine.step()
            except RuntimeError:
                assert fails
            kv.check()
        engine.take_ended()
        return request

    ask(A)
    ask(B)
    assert ask(A).num_cached_tokens == 40
    # The step that fails would have written A to the host and loaded B.
    assert ask(B, fails=True).status is RequestStatus.ABORTED
    again = [ask(hashes) for hashes in (A, B, A, B)]
    assert [request.num_cached_tokens for request in again[:2]] == [0, 0]
    assert [request.num_cached_tokens for request in again[2:]] == [40, 40]
    assert all(request.status is RequestStatus.FINISHED for request in again)
