"""Simulation: equal to a naive simulator to the last bit, open loop, and fair to policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from factories import make_model, make_request
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import (
    SLO,
    BatchShape,
    EndReason,
    Limits,
    Policy,
    RequestStatus,
    ScheduledBatch,
    ScheduledChunk,
    SchedulerOutput,
    SchedulerView,
)
from slosched.engine.loop import StepRecord
from slosched.perfmodel import LinearCoefficients, LinearModel, load_model
from slosched.policy import FCFS, Goodput
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.workload.trace import Trace, TraceRequest

TICK_S = 2.0**-12
"""All times are multiples of this, so that sums are exact in any order."""

EXACT = LinearCoefficients(
    per_token_s=TICK_S,
    per_attention_s=TICK_S / 64,
    per_context_s=TICK_S / 32,
    per_tile_s=4 * TICK_S,
    any_decode_s=TICK_S,
    per_swapped_block_s=0.0,
    constant_s=8 * TICK_S,
)


def make_trace(*lines: tuple[float, int, int]) -> Trace:
    """Make a trace from (arrival_s, prompt tokens, output tokens) of each request."""
    return Trace.of([TraceRequest(f"r{i}", *line) for i, line in enumerate(lines)], "test")


def naive_fcfs(trace: Trace, max_tokens: int, max_seqs: int) -> dict[str, list[float]]:
    """Compute token times under FCFS with chunked prefill and unlimited memory, naively."""
    todo = [
        (r.request_id, r.arrival_s, r.num_prompt_tokens, r.num_output_tokens)
        for r in trace.requests
    ]
    times: dict[str, list[float]] = {name: [] for name, *_ in todo}
    computed = dict.fromkeys(times, 0)
    running: list[tuple[str, float, int, int]] = []
    now_s = 0.0
    while todo or running:
        if not running:
            now_s = max(now_s, todo[0][1])
        batch: list[tuple[str, int]] = []
        budget = max_tokens
        for name, _, prompt, _ in running:
            n = min(prompt + len(times[name]) - computed[name], budget)
            budget -= n
            batch += [(name, n)] * (n > 0)
        while todo and todo[0][1] <= now_s and len(running) < max_seqs and budget > 0:
            running.append(todo.pop(0))
            n = min(running[-1][2], budget)
            budget -= n
            batch.append((running[-1][0], n))
        now_s += naive_step_s([(n, computed[name]) for name, n in batch])
        for name, n in batch:
            computed[name] += n
        for name, _, prompt, _ in running:
            if computed[name] == prompt + len(times[name]):
                times[name].append(now_s)
        running = [r for r in running if len(times[r[0]]) < r[3]]
    return times


def naive_step_s(chunks: Sequence[tuple[int, int]]) -> float:
    tokens = sum(n for n, _ in chunks)
    pairs = sum(prior + i + 1 for n, prior in chunks if n > 1 for i in range(n))
    context = sum(prior + 1 for n, prior in chunks if n == 1)
    tiles = len(range(0, tokens, 64))
    ticks = tokens + pairs / 64 + context / 32 + 4 * tiles + 8 + (1 if context else 0)
    return ticks * TICK_S


lines = st.tuples(st.integers(0, 400), st.integers(1, 120), st.integers(1, 12))


@given(
    st.lists(lines, min_size=1, max_size=12),
    st.sampled_from((1, 16, 64, 200)),
    st.sampled_from((1, 3, 64)),
)
def test_fcfs_is_simulated_as_a_naive_simulator_does_it(
    ticks: list[tuple[int, int, int]], max_tokens: int, max_seqs: int
) -> None:
    trace = make_trace(*((ticks * TICK_S, prompt, output) for ticks, prompt, output in ticks))
    config = SimulationConfig(Limits(max_tokens, max_seqs), num_blocks=1000)
    requests = simulate(trace, FCFS(), LinearModel(EXACT), config)
    assert {r.request_id: r.token_times_s for r in requests} == naive_fcfs(
        trace, max_tokens, max_seqs
    )


def decode_batch(num_prior_tokens: int) -> ScheduledBatch:
    request = make_request(num_prompt_tokens=8)
    shape = BatchShape()
    shape.add(1, num_prior_tokens)
    chunk = ScheduledChunk(request, 1, num_prior_tokens, True, [0, 1])
    return ScheduledBatch((chunk,), (), (), shape)


def test_the_device_stops_a_request_at_its_true_length_and_not_before() -> None:
    executor = SimulatedExecutor(make_model(), VirtualClock(), {"r0": 2})
    assert executor.execute(decode_batch(7)).stopped == frozenset()
    assert executor.execute(decode_batch(8)).stopped == {"r0"}


def test_virtual_time_never_goes_back() -> None:
    clock = VirtualClock(5.0)
    clock.advance_to(3.0)
    assert clock.now_s() == 5.0
    clock.advance_to(8.0)
    assert clock.now_s() == 8.0


def test_arrivals_do_not_wait_for_a_slow_device() -> None:
    trace = make_trace(*((0.01 * i, 32, 8) for i in range(40)))
    slow = make_model(constant_s=0.5)
    records: list[StepRecord] = []
    config = SimulationConfig(Limits(max_num_seqs=4))
    requests = simulate(trace, FCFS(), slow, config, on_step=records.append)
    assert [r.arrival_s for r in requests] == [r.arrival_s for r in trace.requests]
    assert [r.request_id for r in requests] == [r.request_id for r in trace.requests]
    assert max(record.num_waiting for record in records) == 40 - 4
    assert all(
        chunk.request.arrival_s <= record.start_s
        for record in records
        for chunk in record.batch.chunks
    )


def test_an_idle_device_waits_for_the_next_arrival() -> None:
    trace = make_trace((0.0, 8, 1), (100.0, 8, 1))
    model = make_model()
    first, second = simulate(trace, FCFS(), model)
    alone_s = model.predict_prefill(8)
    assert first.token_times_s == [pytest.approx(alone_s)]
    assert second.token_times_s == [pytest.approx(100.0 + alone_s)]


@dataclass
class Spy(Policy):
    """FCFS that notes what it can see of output lengths."""

    limits_seen: dict[str, int] = field(default_factory=dict)
    num_resets: int = 0

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        for r in (*view.waiting, *view.running):
            assert self.limits_seen.setdefault(r.request_id, r.max_tokens) == r.max_tokens
        return FCFS().schedule(view)

    def reset(self) -> None:
        self.limits_seen.clear()
        self.num_resets += 1


def test_true_lengths_are_honoured_and_hidden_from_the_policy() -> None:
    trace = make_trace((0.0, 10, 3), (0.0, 20, 7), (0.1, 30, 5), (0.2, 40, 1))
    spy = Spy()
    requests = simulate(trace, spy, make_model())
    assert [r.num_output_tokens for r in requests] == [3, 7, 5, 1]
    assert set(spy.limits_seen.values()) == {7}
    assert [r.end_reason for r in requests] == [EndReason.STOP] * 4


def test_a_limit_is_capped_where_the_kv_cache_could_not_hold_it() -> None:
    trace = make_trace((0.0, 10, 30), (0.0, 60, 2), (0.0, 62, 10))
    spy = Spy()
    config = SimulationConfig(num_blocks=4, block_size=16)
    requests = simulate(trace, spy, make_model(), config)
    assert [r.max_tokens for r in requests] == [30, 4, 10]
    assert [r.num_output_tokens for r in requests] == [30, 2, 0]
    assert requests[2].status is RequestStatus.REJECTED
    assert requests[2].end_reason is EndReason.TOO_LONG


def test_a_policy_starts_every_simulation_afresh() -> None:
    spy = Spy(limits_seen={"r0": 99})
    simulate(make_trace((0.0, 10, 3)), spy, make_model())
    assert spy.num_resets == 1
    assert spy.limits_seen == {"r0": 3}


def test_the_policy_predicts_with_its_own_model() -> None:
    device, belief = make_model(), make_model(constant_s=1.0)
    records: list[StepRecord] = []
    trace = make_trace((0.0, 10, 3))
    simulate(trace, FCFS(), device, scheduler_model=belief, on_step=records.append)
    for record in records:
        assert record.batch.predicted_s == belief.predict(record.batch.shape)
        assert record.result.elapsed_s == device.predict(record.batch.shape)


def test_online_the_policy_learns_how_slow_the_device_is() -> None:
    belief = make_model()
    slow = {name: 1.5 * seconds for name, seconds in vars(belief.coefficients).items()}
    device = LinearModel(LinearCoefficients(**slow))
    trace = make_trace(*((0.1 * i, 50, 40) for i in range(20)))
    for online, expected in ((False, 1.5), (True, 1.0)):
        ratios: list[float] = []

        def note(record: StepRecord, ratios: list[float] = ratios) -> None:
            assert record.batch.predicted_s is not None
            ratios.append(record.result.elapsed_s / record.batch.predicted_s)

        config = SimulationConfig(online=online)
        simulate(trace, FCFS(), device, config, scheduler_model=belief, on_step=note)
        assert ratios[0] == pytest.approx(1.5)
        assert np.median(ratios[100:]) == pytest.approx(expected, rel=0.02)


def test_requests_that_come_at_once_end_alike_whether_each_step_is_looked_at_or_not() -> None:
    """More of them become hopeless in one step than a step looks at, and their names do not tell
    the order in which they came."""
    trace = Trace.of(
        [
            TraceRequest(f"r{i}", 0.0, 300, 300, slo=SLO(ttft_s=2.0, tpot_s=0.05))
            for i in range(900)
        ],
        "at once",
    )
    model = load_model("h100/llama-3.1-8b")
    config = SimulationConfig(
        Limits(max_num_seqs=16), num_blocks=20_000, disturbances=Disturbances(0.05), online=True
    )
    grouped = simulate(trace, Goodput(), model, config)
    step_by_step = simulate(trace, Goodput(), model, config, on_step=lambda _: None)
    assert [(r.end_s, r.end_reason) for r in grouped] == [
        (r.end_s, r.end_reason) for r in step_by_step
    ]
