"""The step loop: a fault loses no request, idling is noticed, and clients and models get their
results."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from factories import make_model, make_request, make_scheduler

from slosched.core import (
    BatchShape,
    EndReason,
    Limits,
    OnInfeasible,
    Policy,
    RequestStatus,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerView,
    StalledError,
    StepResult,
    fan_out,
)
from slosched.engine.loop import Engine, ExecutorFaultError
from slosched.kv import KVCache
from slosched.perfmodel import LinearModel
from slosched.policy import FCFS
from slosched.scheduler import Scheduler
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock


class DeviceError(RuntimeError):
    """An error that a broken device raises."""


class Device(SimulatedExecutor):
    """A simulated device that can break, and that remembers which requests were released."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(make_model(), clock, {})
        self.is_broken = False
        self.released: list[str] = []

    def execute(self, batch: ScheduledBatch) -> StepResult:
        if self.is_broken:
            raise DeviceError("out of memory")
        return super().execute(batch)

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


@dataclass
class Plans(Policy):
    """Carries out given plans one after the other, then nothing."""

    plans: list[SchedulerOutput] = field(default_factory=list)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return self.plans.pop(0) if self.plans else SchedulerOutput()


class Learner(LinearModel):
    """A model that keeps what it observes."""

    def __init__(self) -> None:
        super().__init__(make_model().coefficients)
        self.seen: list[tuple[BatchShape, float]] = []

    def observe(self, shape: BatchShape, seconds: float) -> None:
        self.seen.append((shape, seconds))


def make_engine(
    policy: Policy | None = None, limits: Limits | None = None, model: LinearModel | None = None
) -> tuple[Engine, Device]:
    clock = VirtualClock()
    kv = KVCache(num_blocks=16, block_size=4, num_host_blocks=16)
    scheduler = Scheduler(policy or FCFS(), kv, limits, model or make_model())
    device = Device(clock)
    return Engine(scheduler, device, clock), device


def run_to_end(engine: Engine) -> list[str]:
    ended = []
    while engine.scheduler.num_unfinished:
        ended += [r.request_id for r in engine.step().ended]
    return ended


def test_a_fault_ends_exactly_the_requests_in_the_batch() -> None:
    engine, device = make_engine(limits=Limits(max_num_seqs=2))
    hit = [make_request("a"), make_request("b")]
    spared = make_request("c", max_tokens=2)
    for request in (*hit, spared):
        engine.scheduler.add_request(request)
    engine.step()
    broke_s = engine.clock.now_s()
    device.is_broken = True
    with pytest.raises(DeviceError, match="out of memory"):
        engine.step()
    for request in hit:
        assert (request.status, request.end_reason) == (RequestStatus.ABORTED, EndReason.FAULT)
        assert request.end_s == broke_s
        assert request.num_output_tokens == 1, "what came out before stays"
    assert spared.status is RequestStatus.WAITING
    engine.scheduler.kv.check()

    device.is_broken = False
    assert run_to_end(engine) == ["a", "b", "c"]
    assert spared.status is RequestStatus.FINISHED
    assert engine.scheduler.kv.num_free_blocks == 16


def test_a_fault_ends_those_whose_cache_was_being_copied() -> None:
    plans = Plans(
        [
            SchedulerOutput({"out": 8, "in": 8, "idle": 8}),
            SchedulerOutput(swapped_out=("in",)),
            SchedulerOutput({"in": 1}, swapped_in=("in",), swapped_out=("out",)),
        ]
    )
    engine, device = make_engine(plans)
    requests = {name: make_request(name) for name in ("out", "in", "idle")}
    for request in requests.values():
        engine.scheduler.add_request(request)
    engine.step()
    engine.step()
    device.is_broken = True
    with pytest.raises(DeviceError):
        engine.step()
    assert {name: r.end_reason for name, r in requests.items()} == {
        "out": EndReason.FAULT,
        "in": EndReason.FAULT,
        "idle": None,
    }
    assert {r.request_id for r in engine.take_ended()} == {"out", "in"}
    engine.scheduler.kv.check()
    assert engine.scheduler.kv.num_free_host_blocks == 16


def test_requests_may_join_after_a_fault() -> None:
    engine, device = make_engine()
    engine.scheduler.add_request(make_request("a"))
    device.is_broken = True
    with pytest.raises(DeviceError):
        engine.step()
    device.is_broken = False
    engine.scheduler.add_request(make_request("b", max_tokens=1))
    assert run_to_end(engine) == ["a", "b"]


def test_work_that_nobody_schedules_is_an_error_that_counts_it() -> None:
    engine, _ = make_engine(Plans())
    engine.scheduler.add_request(make_request("a"))
    engine.scheduler.add_request(make_request("b"))
    with pytest.raises(StalledError, match="2 waiting, 0 running, 0 swapped"):
        engine.step()
    assert engine.scheduler.num_waiting == 2


def test_a_request_that_is_served_in_any_case_may_be_rejected_many_times_in_a_row() -> None:
    again = SchedulerOutput(rejected={"a": EndReason.INFEASIBLE})
    engine, _ = make_engine(Plans([*[again] * 15, SchedulerOutput({"a": 8})]))
    request = make_request("a", 8, max_tokens=1)
    request.on_infeasible = OnInfeasible.SERVE
    engine.scheduler.add_request(request)
    assert run_to_end(engine) == ["a"]
    assert request.end_reason is EndReason.LENGTH
    assert request.slo.ttft_s == 2**15 * make_request().slo.ttft_s


def test_any_number_of_steps_may_reject_the_first_of_a_group() -> None:
    scheduler = make_scheduler(Plans())
    engine = Engine(scheduler, Device(clock := VirtualClock()), clock)
    plans = scheduler.policy.plans  # type: ignore[attr-defined]
    for i in range(40):
        first, *others = fan_out(make_request(f"r{i}"), 3)
        scheduler.add_request(first)
        plans.append(SchedulerOutput(rejected={first.request_id: EndReason.OVERLOAD}))
        assert engine.step().ended[-1] is first
    assert engine.step().ended == others
    assert not engine.has_work


def test_nothing_to_do_is_not_a_stall() -> None:
    engine, _ = make_engine(Plans())
    record = engine.step()
    assert record.batch.is_empty
    assert (record.start_s, record.end_s) == (0.0, 0.0)


def test_a_step_that_only_rejects_is_not_a_stall() -> None:
    plans = Plans([SchedulerOutput(rejected={"a": EndReason.CASCADE}), SchedulerOutput({"b": 8})])
    engine, device = make_engine(plans)
    engine.scheduler.add_request(make_request("a"))
    engine.scheduler.add_request(make_request("b", max_tokens=1))
    assert [r.request_id for r in engine.step().ended] == ["a"]
    assert [r.request_id for r in engine.step().ended] == ["b"]
    assert device.released == ["a", "b"]


def test_the_model_sees_every_executed_step_and_what_it_took() -> None:
    model = Learner()
    engine, _ = make_engine(model=model)
    engine.scheduler.add_request(make_request("a", 8, max_tokens=3))
    records = []
    while engine.scheduler.num_unfinished:
        records.append(engine.step())
    assert model.seen == [(r.batch.shape, r.result.elapsed_s) for r in records]
    assert [shape.num_tokens for shape, _ in model.seen] == [8, 1, 1]
    assert all(seconds > 0 for _, seconds in model.seen)


def test_the_model_is_not_shown_steps_that_computed_nothing() -> None:
    model = Learner()
    plans = Plans([SchedulerOutput({"a": 8}), SchedulerOutput(swapped_out=("a",))])
    engine, _ = make_engine(plans, model=model)
    engine.scheduler.add_request(make_request("a"))
    engine.step()
    copied = engine.step()
    assert len(copied.batch.swap_out) == 2
    assert copied.result.elapsed_s > 0
    assert [shape.num_tokens for shape, _ in model.seen] == [8]


def test_every_ended_request_is_released_once() -> None:
    engine, device = make_engine(limits=Limits(max_num_seqs=3))
    for i in range(6):
        engine.scheduler.add_request(make_request(f"r{i}", max_tokens=1 + i % 3))
    engine.scheduler.add_request(make_request("too long", max_tokens=1000))
    engine.step()
    engine.scheduler.end("r5", EndReason.CLIENT, engine.clock.now_s())
    run_to_end(engine)
    assert sorted(device.released) == ["r0", "r1", "r2", "r3", "r4", "r5", "too long"]


def test_a_record_shows_the_queues_as_the_device_ran_the_step() -> None:
    engine, _ = make_engine(limits=Limits(max_num_seqs=2))
    for name in "abc":
        engine.scheduler.add_request(make_request(name, 8, max_tokens=1))
    record = engine.step()
    assert (record.num_waiting, record.num_running, record.num_swapped) == (1, 2, 0)
    assert record.kv_used_fraction == pytest.approx(4 / 16)
    assert record.end_s - record.start_s == pytest.approx(record.result.elapsed_s)
    assert record.batch.predicted_s == record.result.elapsed_s
    assert [r.request_id for r in record.ended] == ["a", "b"]


def test_an_executor_that_forgets_a_token_is_at_fault_before_anything_is_booked() -> None:
    """A step must not be accounted for in part: all of its requests end, exactly once."""

    class Forgetful(SimulatedExecutor):
        def execute(self, batch: ScheduledBatch) -> StepResult:
            result = super().execute(batch)
            tokens = dict(list(result.token_ids.items())[:-1])
            return StepResult(tokens, result.stopped, result.elapsed_s)

    scheduler = make_scheduler()
    clock = VirtualClock()
    for i in range(3):
        scheduler.add_request(make_request(f"r{i}"))
    engine = Engine(scheduler, Forgetful(make_model(), clock, {}), clock)
    with pytest.raises(ExecutorFaultError, match="'r2'"):
        engine.step()
    ended = engine.take_ended()
    assert [r.end_reason for r in ended] == [EndReason.FAULT] * 3
    assert [r.num_output_tokens for r in ended] == [0] * 3
    scheduler.kv.check()
    assert scheduler.num_unfinished == 0


def test_the_model_learns_from_steps_with_the_part_that_only_the_host_sees() -> None:
    def seen(host_s: float) -> list[float]:
        model = Learner()
        engine, device = make_engine(model=model)
        engine = Engine(engine.scheduler, device, engine.clock, host_s=host_s)
        engine.scheduler.add_request(make_request(max_tokens=3))
        run_to_end(engine)
        return [seconds for _, seconds in model.seen]

    assert seen(0.25) == [seconds + 0.25 for seconds in seen(0.0)]
