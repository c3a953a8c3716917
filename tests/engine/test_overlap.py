"""A step is planned while the previous one runs: what that hides, what it costs, what it must not
break."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from factories import make_model, make_request
from hypothesis import given, settings

from slosched.core import (
    PLACEHOLDER,
    DeadlineRule,
    EndReason,
    IllegalPlanError,
    Limits,
    Policy,
    Request,
    RequestStatus,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerView,
    StalledError,
    StepResult,
)
from slosched.engine.loop import Engine
from slosched.engine.overlap import OverlappedEngine
from slosched.kv import NO_PREFIX_HOST, KVCache, PrefixCaching
from slosched.perfmodel import LinearModel
from slosched.policy import FCFS, POLICIES
from slosched.scheduler import Scheduler
from slosched.simulator.scheduling_time import MEASURED, SimulatedDevice, TakesTime
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.testing import Scenario, play, scenarios
from slosched.workload import Trace, TraceRequest

STEP_S = 1.0


def steps_of_a_second() -> LinearModel:
    return make_model(0, 0, 0, 0, 0, 0, constant_s=STEP_S)


@dataclass
class Plans(Policy):
    """Carries out given plans one after the other, and keeps what it saw."""

    plans: list[SchedulerOutput] = field(default_factory=list)
    seen: list[dict[str, tuple[float, int, float]]] = field(default_factory=list)
    """For each request: when the step begins, its output tokens, when the next is due."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        requests = (*view.waiting, *view.running, *view.swapped)
        self.seen.append(
            {r.request_id: (view.now_s, r.num_output_tokens, r.deadline_s) for r in requests}
        )
        return self.plans.pop(0) if self.plans else SchedulerOutput()


class DeviceError(RuntimeError):
    """An error that a broken device raises."""


class Device(SimulatedDevice):
    """A device that fails at given steps, and remembers which requests were released."""

    def __init__(self, executor: SimulatedExecutor, clock: VirtualClock, host: VirtualClock):
        super().__init__(executor, clock, host)
        self.broken_steps: set[int] = set()
        self.num_launched = 0
        self.released: list[str] = []

    def launch(self, batch: ScheduledBatch) -> Callable[[], StepResult]:
        step, wait = self.num_launched, super().launch(batch)
        self.num_launched += 1

        def wait_or_fail() -> StepResult:
            if step in self.broken_steps:
                raise DeviceError(f"step {step}")
            return wait()

        return wait_or_fail

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def make_engine(
    policy: Policy | None = None,
    lengths: dict[str, int] | None = None,
    schedule_s: float = 0.0,
    limits: Limits | None = None,
    prefix_cache: PrefixCaching = PrefixCaching.OFF,
) -> tuple[OverlappedEngine, Device]:
    host, clock, model = VirtualClock(), VirtualClock(), steps_of_a_second()
    kv = KVCache(16, 4, num_host_blocks=16, prefix_index=prefix_cache.new_index())
    scheduler = Scheduler(TakesTime(policy or FCFS(), host, schedule_s), kv, limits, model)
    device = Device(SimulatedExecutor(model, clock, lengths or {}), clock, host)
    return OverlappedEngine(scheduler, device, host), device


def make_prompt(name: str, prompt: Sequence[int]) -> Request:
    return Request(name, 0.0, len(prompt), max_tokens=2, prompt_token_ids=prompt)


def test_who_counts_on_what_a_failed_step_was_to_compute_ends_with_it() -> None:
    """Its own step was already launched, and would read what was never written."""
    engine, device = make_engine(
        limits=Limits(max_num_batched_tokens=8), prefix_cache=PrefixCaching.HASH
    )
    device.broken_steps = {0}
    prompt = list(range(8))
    requests = [make_prompt("a", prompt), make_prompt("b", [*prompt, 1]), make_prompt("c", [5, 6])]
    for request in requests:
        engine.scheduler.add_request(request)
    with pytest.raises(DeviceError):
        engine.step()
    assert requests[1].num_cached_tokens == 8, "what a step that runs computes is found"
    engine.scheduler.kv.check()
    run_to_end(engine)
    ends = [request.end_reason for request in requests]
    assert ends == [EndReason.FAULT, EndReason.FAULT, EndReason.LENGTH]
    again = make_prompt("d", [*prompt, 2])
    engine.scheduler.add_request(again)
    run_to_end(engine)
    assert (again.num_cached_tokens, again.end_reason) == (0, EndReason.LENGTH)


def run_to_end(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def test_tokens_come_as_without_overlap_and_no_placeholder_is_left() -> None:
    engine, _ = make_engine()
    request = make_request("a", 8, max_tokens=4)
    engine.scheduler.add_request(request)
    engine.step()
    assert request.token_times_s == [1.0], "the next step runs, but nothing of it is booked"
    assert (request.num_computed_tokens, request.num_uncomputed_tokens) == (9, 0)
    run_to_end(engine)
    assert request.token_times_s == [1.0, 2.0, 3.0, 4.0]
    assert request.output_token_ids == [0] * 4
    assert (request.end_reason, request.num_output_placeholders) == (EndReason.LENGTH, 0)


def test_who_reaches_its_limit_has_no_part_in_the_next_step() -> None:
    engine, device = make_engine()
    engine.scheduler.add_request(make_request("a", 8, max_tokens=3))
    run_to_end(engine)
    assert device.num_launched == 3


def test_who_is_ended_by_the_model_has_one_and_it_is_wasted() -> None:
    engine, device = make_engine(lengths={"a": 3})
    request = make_request("a", 8, max_tokens=10)
    engine.scheduler.add_request(request)
    tokens = []
    while engine.has_work:
        tokens.append(dict(engine.step().result.token_ids))
    assert device.num_launched == 4
    assert tokens == [{"a": 0}] * 3 + [{}], "nobody is told of a token of the dead"
    assert request.token_times_s == [1.0, 2.0, 3.0]
    assert (request.end_reason, request.end_s) == (EndReason.STOP, 3.0)
    assert engine.scheduler.kv.num_free_blocks == 16


def test_the_policy_sees_what_will_be_when_its_step_begins() -> None:
    policy = Plans([SchedulerOutput({"a": 8}), SchedulerOutput({"a": 1})])
    engine, _ = make_engine(policy, limits=Limits(deadline_rule=DeadlineRule.TBT))
    request = make_request("a", 8, ttft_s=5.0, tpot_s=0.25)
    engine.scheduler.add_request(request)
    engine.step()
    assert policy.seen == [{"a": (0.0, 0, 5.0)}, {"a": (1.0, 1, 1.25)}]


def test_a_forecast_that_was_wrong_is_replaced_by_what_came() -> None:
    """The policy predicts steps of one second, but the device takes two."""
    policy = Plans([SchedulerOutput({"a": 8}), SchedulerOutput({"a": 1})])
    host, clock = VirtualClock(), VirtualClock()
    kv = KVCache(num_blocks=16, block_size=4)
    limits = Limits(deadline_rule=DeadlineRule.TBT)
    scheduler = Scheduler(policy, kv, limits, steps_of_a_second())
    slow = SimulatedExecutor(make_model(0, 0, 0, 0, 0, 0, constant_s=2.0), clock, {})
    engine = OverlappedEngine(scheduler, SimulatedDevice(slow, clock, host), host)
    request = make_request("a", 8, tpot_s=0.25)
    scheduler.add_request(request)
    engine.step()
    assert policy.seen[1]["a"] == (1.0, 1, 1.25)
    assert (request.token_times_s, request.deadline_s) == ([2.0], 2.25)


def test_an_arrival_during_a_step_is_planned_one_step_later() -> None:
    engine, _ = make_engine()
    early, late = make_request("early", max_tokens=6), make_request("late", arrival_s=0.5)
    engine.scheduler.add_request(early)
    engine.step()
    engine.scheduler.add_request(late)
    run_to_end(engine)
    assert late.started_s == 2.0, "the step that began at 1 was planned at 0"
    assert late.token_times_s[0] == 3.0


@pytest.mark.parametrize(("schedule_s", "step_s"), [(0.25, 1.0), (1.0, 1.0), (1.5, 1.5)])
def test_the_schedulers_time_is_hidden_up_to_the_length_of_a_step(
    schedule_s: float, step_s: float
) -> None:
    engine, _ = make_engine(schedule_s=schedule_s)
    request = make_request("a", 8, max_tokens=4)
    engine.scheduler.add_request(request)
    run_to_end(engine)
    # The first decision is not hidden.  One that takes longer than its step delays the result, too.
    first_s = schedule_s + step_s
    assert request.token_times_s[:3] == [first_s, first_s + step_s, first_s + 2 * step_s]


def test_without_overlap_every_step_waits_for_its_decision() -> None:
    clock, model = VirtualClock(), steps_of_a_second()
    policy = TakesTime(FCFS(), clock, 0.25)
    scheduler = Scheduler(policy, KVCache(16, 4), None, model)
    request = make_request("a", 8, max_tokens=3)
    scheduler.add_request(request)
    run_to_end(Engine(scheduler, SimulatedExecutor(model, clock, {}), clock))
    assert request.token_times_s == [1.25, 2.5, 3.75]


def test_a_replay_loses_the_time_of_its_decisions_unless_they_overlap() -> None:
    trace = Trace.of([TraceRequest(f"r{i}", 0.0, 8, 40) for i in range(4)], "test")

    def end_s(schedule_s: float, *, overlap: bool) -> float:
        config = SimulationConfig(schedule_s=schedule_s, overlap=overlap)
        requests = simulate(trace, FCFS(), steps_of_a_second(), config)
        return max(request.token_times_s[-1] for request in requests)

    assert end_s(0.0, overlap=False) == 40.0
    assert end_s(0.5, overlap=False) == 60.0
    assert end_s(0.5, overlap=True) == 40.5, "only the first decision hides behind nothing"


def test_a_measured_decision_takes_the_time_that_it_took() -> None:
    clock = VirtualClock()
    policy = TakesTime(FCFS(), clock, MEASURED)
    scheduler = Scheduler(policy, KVCache(16, 4))
    scheduler.add_request(make_request())
    scheduler.schedule(0.0)
    assert 0 < clock.now_s() < 1


@pytest.mark.parametrize("schedule_s", [-1.0, math.inf, math.nan])
def test_a_decision_takes_a_finite_time(schedule_s: float) -> None:
    with pytest.raises(ValueError, match="schedule_s"):
        TakesTime(FCFS(), VirtualClock(), schedule_s)


def test_who_is_preempted_while_its_token_is_computed_still_gets_it() -> None:
    plans = Plans(
        [
            SchedulerOutput({"a": 8}),
            SchedulerOutput({"b": 8}, preempted=("a",)),
            SchedulerOutput({"a": 9}),
        ]
    )
    engine, _ = make_engine(plans)
    a, b = make_request("a", 8), make_request("b", 8)
    engine.scheduler.add_request(a)
    engine.scheduler.add_request(b)
    engine.step()
    assert (a.status, a.token_times_s, a.num_computed_tokens) == (RequestStatus.WAITING, [1.0], 0)
    engine.step()
    engine.step()
    assert a.token_times_s == [1.0, 3.0]
    assert b.token_times_s == [2.0]
    engine.scheduler.kv.check()


def test_who_is_preempted_but_had_been_ended_by_the_model_is_finished() -> None:
    plans = Plans([SchedulerOutput({"a": 8, "b": 8}), SchedulerOutput({"b": 1}, preempted=("a",))])
    engine, _ = make_engine(plans, lengths={"a": 1})
    a = make_request("a", 8)
    engine.scheduler.add_request(a)
    engine.scheduler.add_request(make_request("b", 8, max_tokens=2))
    run_to_end(engine)
    assert (a.end_reason, a.token_times_s) == (EndReason.STOP, [1.0])
    assert engine.scheduler.kv.num_free_blocks == 16


def test_who_is_swapped_out_while_its_token_is_computed_still_gets_it() -> None:
    plans = Plans(
        [
            SchedulerOutput({"a": 8, "b": 8}),
            SchedulerOutput({"b": 1}, swapped_out=("a",)),
            SchedulerOutput({"a": 1}, swapped_in=("a",)),
        ]
    )
    engine, _ = make_engine(plans)
    a = make_request("a", 8)
    engine.scheduler.add_request(a)
    engine.scheduler.add_request(make_request("b", 8))
    for _ in range(3):
        engine.step()
    assert a.token_times_s == [1.0, 3.0]
    assert a.num_swaps == 1


def test_a_prompt_may_be_rejected_while_it_runs() -> None:
    plans = Plans(
        [
            SchedulerOutput({"a": 4, "b": 8}),
            SchedulerOutput({"b": 1}, rejected={"a": EndReason.INFEASIBLE}),
        ]
    )
    engine, device = make_engine(plans)
    a = make_request("a", 8)
    engine.scheduler.add_request(a)
    engine.scheduler.add_request(make_request("b", 8, max_tokens=2))
    assert [r.request_id for r in engine.step().ended] == ["a"]
    assert (a.end_reason, a.end_s, a.token_times_s) == (EndReason.INFEASIBLE, 0.0, [])
    run_to_end(engine)
    assert device.released == ["a", "b"]


def test_a_client_may_go_while_its_step_runs() -> None:
    engine, device = make_engine()
    a, b = make_request("a", 8), make_request("b", 8, max_tokens=3)
    engine.scheduler.add_request(a)
    engine.scheduler.add_request(b)
    engine.step()
    engine.scheduler.end("a", EndReason.CLIENT, engine.clock.now_s())
    record = engine.step()
    assert dict(record.result.token_ids) == {"b": 0}
    assert record.batch.shape.num_decodes == 2, "the device computed it all the same"
    assert a.token_times_s == [1.0]
    run_to_end(engine)
    assert b.token_times_s == [1.0, 2.0, 3.0]
    assert device.released == ["a", "b"]


def test_a_fault_ends_the_requests_of_its_step_and_forgets_what_was_foreseen() -> None:
    engine, device = make_engine(limits=Limits(max_num_seqs=2))
    hit = [make_request("a"), make_request("b")]
    spared = make_request("c", max_tokens=2)
    for request in (*hit, spared):
        engine.scheduler.add_request(request)
    device.broken_steps = {1}
    engine.step()
    with pytest.raises(DeviceError):
        engine.step()
    for request in hit:
        assert (request.end_reason, request.num_output_tokens) == (EndReason.FAULT, 1)
        assert PLACEHOLDER not in request.output_token_ids
        assert len(request.token_times_s) == 1
    engine.scheduler.kv.check()
    run_to_end(engine)
    assert spared.status is RequestStatus.FINISHED
    assert sorted(device.released) == ["a", "b", "c"]


def test_if_a_plan_is_illegal_the_running_step_is_still_booked() -> None:
    plans = Plans([SchedulerOutput({"a": 8}), SchedulerOutput({"a": 7})])
    engine, _ = make_engine(plans)
    request = make_request("a", 8)
    engine.scheduler.add_request(request)
    with pytest.raises(IllegalPlanError):
        engine.step()
    assert (request.token_times_s, request.output_token_ids) == ([1.0], [0])
    assert not request.num_output_placeholders
    with pytest.raises(StalledError):
        engine.step()


def test_an_illegal_plan_is_told_although_the_running_step_fails() -> None:
    """The server would go on, as after any fault, with a plan that may be carried out by half."""
    plans = Plans([SchedulerOutput({"a": 8}), SchedulerOutput({"a": 7})])
    engine, device = make_engine(plans)
    device.broken_steps = {0}
    request = make_request("a", 8)
    engine.scheduler.add_request(request)
    with pytest.raises(IllegalPlanError):
        engine.step()
    assert (engine.num_faults, request.end_reason) == (0, EndReason.FAULT)


def test_a_plan_may_be_empty_while_a_step_runs() -> None:
    plans = Plans([SchedulerOutput({"a": 8}), SchedulerOutput(), SchedulerOutput({"a": 1})])
    engine, device = make_engine(plans)
    request = make_request("a", 8, max_tokens=2)
    engine.scheduler.add_request(request)
    run_to_end(engine)
    assert request.token_times_s == [1.0, 2.0]
    assert device.num_launched == 2


@pytest.mark.parametrize("name", ["fcfs", "slo_aware", "goodput"])
def test_where_nothing_is_a_surprise_overlap_changes_nothing(name: str) -> None:
    """All requests are there at once, run to their limits, and need no block of one that ends.

    They share no blocks either, since a plan finds what a step computes only after that step has
    ended.
    """

    @settings(max_examples=20, deadline=None, database=None)
    @given(scenarios())
    def decides_the_same(scenario: Scenario) -> None:
        requests = tuple(
            replace(r, arrival_s=0.0, num_output_tokens=scenario.max_tokens, abort_at_step=None)
            for r in scenario.requests
        )
        plenty = sum(
            -(-(r.num_prompt_tokens + r.num_output_tokens) // scenario.block_size) for r in requests
        )
        scenario = replace(
            scenario,
            requests=requests,
            num_blocks=plenty,
            prefix_cache=PrefixCaching.OFF,
            prefix_host=NO_PREFIX_HOST,
        )
        plain = play(POLICIES[name](), replace(scenario, overlap=False))
        overlapped = play(POLICIES[name](), replace(scenario, overlap=True))
        assert decided(overlapped.decisions) == decided(plain.decisions)
        for ours, theirs in zip(overlapped.requests, plain.requests, strict=True):
            assert ours.token_times_s == theirs.token_times_s
            assert (ours.end_reason, ours.started_s) == (theirs.end_reason, theirs.started_s)

    decides_the_same()


def decided(decisions: list[tuple[float, SchedulerOutput]]) -> list[tuple[float, SchedulerOutput]]:
    """Return the decisions that scheduled something."""
    return [(now_s, output) for now_s, output in decisions if not output.is_empty]
