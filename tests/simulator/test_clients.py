"""Clients that disconnect when they have not had their whole answer in time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import EndReason, Limits, Request, RequestStatus
from slosched.engine.loop import StepRecord
from slosched.metrics import RequestRecord, summarize
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.policy import FCFS
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace, TraceRequest

A_SECOND_A_STEP = LinearModel(LinearCoefficients(0, 0, 0, 0, 0, 0, constant_s=1.0))
A_TOKEN_COUNTS = LinearModel(LinearCoefficients(2.0**-6, 0, 0, 0, 0, 0, constant_s=2.0**-4))


def make_trace(*lines: tuple[float, int, int]) -> Trace:
    """Make a trace from (arrival_s, prompt tokens, output tokens) of each request."""
    return Trace.of([TraceRequest(f"r{i}", *line) for i, line in enumerate(lines)], "test")


def left(request: Request) -> bool:
    return (request.status, request.end_reason) == (RequestStatus.ABORTED, EndReason.CLIENT)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_client_gets_tokens_until_it_leaves_and_none_after(overlap: bool) -> None:
    config = SimulationConfig(client_timeout_s=3.5, overlap=overlap)
    (request,) = simulate(make_trace((0.0, 8, 10)), FCFS(), A_SECOND_A_STEP, config)
    assert left(request)
    assert request.token_times_s == [1.0, 2.0, 3.0]
    assert request.end_s == 3.5


@pytest.mark.parametrize("overlap", [False, True])
def test_an_answer_that_is_whole_in_time_is_finished(overlap: bool) -> None:
    config = SimulationConfig(client_timeout_s=10.5, overlap=overlap)
    (request,) = simulate(make_trace((0.0, 8, 10)), FCFS(), A_SECOND_A_STEP, config)
    assert request.status is RequestStatus.FINISHED
    assert request.end_s == 10.0


def test_one_that_came_and_left_during_a_step_is_never_planned() -> None:
    records: list[StepRecord] = []
    config = SimulationConfig(client_timeout_s=0.5)
    trace = make_trace((0.0, 8, 1), (0.25, 8, 1))
    requests = simulate(trace, FCFS(), A_SECOND_A_STEP, config, on_step=records.append)
    assert all(map(left, requests))
    assert {c.request.request_id for record in records for c in record.batch.chunks} == {"r0"}
    assert sum(len(record.ended) for record in records) == 2


def test_one_that_waits_in_the_queue_leaves_it_and_its_seat_goes_to_the_next() -> None:
    config = SimulationConfig(Limits(max_num_seqs=1), client_timeout_s=4.0)
    trace = make_trace((0.0, 8, 3), (0.5, 8, 8), (0.6, 8, 1), (5.0, 8, 2))
    first, second, third, fourth = simulate(trace, FCFS(), A_SECOND_A_STEP, config)
    assert first.end_s == 3.0
    assert left(second)
    assert second.token_times_s == [4.0]
    assert (left(third), third.token_times_s) == (True, [])
    assert fourth.token_times_s == [6.0, 7.0]


def test_what_leaves_gives_its_blocks_back() -> None:
    """Two requests fill the cache, so that the third starts only when their clients have left."""
    config = SimulationConfig(num_blocks=8, block_size=16, client_timeout_s=6.0)
    trace = make_trace((0.0, 60, 60), (0.0, 60, 60), (4.0, 60, 2))
    *filling, third = simulate(trace, make_policy("trtllm"), A_SECOND_A_STEP, config)
    assert all(map(left, filling))
    assert third.status is RequestStatus.FINISHED
    assert third.token_times_s[0] > 6.0


lines = st.tuples(st.floats(0, 4), st.integers(1, 60), st.integers(1, 12))


@given(
    st.lists(lines, min_size=1, max_size=12),
    st.floats(0.05, 3),
    st.sampled_from(("fcfs", "sarathi", "vllm_v0", "vllm_v1", "sglang", "edf:drop=expired")),
    st.booleans(),
)
def test_every_request_ends_in_time_or_when_its_client_leaves(
    lines: Sequence[tuple[float, int, int]], timeout_s: float, spec: str, overlap: bool
) -> None:
    trace = make_trace(*sorted(lines))
    config = SimulationConfig(
        Limits(max_num_batched_tokens=32, max_num_seqs=4),
        num_blocks=64,
        overlap=overlap,
        client_timeout_s=timeout_s,
    )
    for request in simulate(trace, make_policy(spec), A_TOKEN_COUNTS, config):
        assert request.end_s is not None
        until_s = request.arrival_s + timeout_s
        assert all(time_s <= until_s for time_s in request.token_times_s)
        if left(request):
            assert request.end_s == until_s
        else:
            assert request.status in (RequestStatus.FINISHED, RequestStatus.REJECTED)


def test_those_that_left_are_misses() -> None:
    config = SimulationConfig(client_timeout_s=3.5)
    trace = make_trace((0.0, 8, 10), (0.0, 8, 2))
    requests = simulate(trace, FCFS(), A_SECOND_A_STEP, config)
    summary = summarize(
        [RequestRecord.from_request(r) for r in requests], config.limits.deadline_rule
    )
    assert (summary.num_good, summary.num_aborted) == (1, 1)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan")])
def test_a_timeout_must_be_positive(timeout_s: float) -> None:
    config = SimulationConfig(client_timeout_s=timeout_s)
    with pytest.raises(ValueError, match="must be positive, not"):
        simulate(make_trace((0.0, 8, 1)), FCFS(), A_SECOND_A_STEP, config)
