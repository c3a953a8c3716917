"""Sessions in a closed loop: when turns arrive, what breaks a session, and programs on time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from fleets import A_SECOND_A_STEP, TWO_SECONDS_A_STEP, make_replicas

from slosched.core import (
    SLO,
    DeadlineRule,
    EndReason,
    Limits,
    OnInfeasible,
    Request,
    RequestStatus,
)
from slosched.evaluate.capacity.point import trace_digest
from slosched.fleet.routers import ROUTERS
from slosched.fleet.routers.round_robin import RoundRobin
from slosched.fleet.simulate import Failure, FleetConfig, simulate_fleet
from slosched.fleet.view import ReplicaKind
from slosched.kv import PrefixCaching
from slosched.metrics import records_of, summarize
from slosched.perfmodel import load_model
from slosched.policy import FCFS
from slosched.policy.kit.drop import Drop
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceError, TraceRequest, read_trace, synthesize, write_trace
from slosched.workload.lengths import Fixed
from slosched.workload.sessions import Sessions

SMALL = Sessions(
    mean_turns=6.0, think_s=0.5, question=Fixed(90), answer=Fixed(12), system_tokens=64
)
CONFIG = SimulationConfig(num_blocks=256, prefix_cache=PrefixCaching.HASH)


def turns(*lines: tuple[str, float, int, float | None], program_s: float | None = None) -> Trace:
    """Make a trace from (session, arrival_s, output tokens, think_s) of each request."""
    requests = [
        TraceRequest(f"r{i}", at_s, 8, num, session_id=name, think_s=think_s, program_s=program_s)
        for i, (name, at_s, num, think_s) in enumerate(lines)
    ]
    return Trace.of(requests, "turns")


def spans(requests: Sequence[Request]) -> dict[str, tuple[float, float | None]]:
    return {r.request_id: (r.arrival_s, r.end_s) for r in requests}


def fates(requests: Sequence[Request]) -> list[tuple[object, ...]]:
    return [(r.request_id, r.arrival_s, r.end_s, tuple(r.token_times_s)) for r in requests]


def small_agents(num_requests: int = 120, rate: float = 12.0) -> Trace:
    trace = synthesize("agents", num_requests=num_requests, rate=rate, sessions=SMALL, seed=3)
    return trace.with_slo(SLO(1.0, 0.05)).with_program_deadlines(0.0, 1.0)


def test_a_turn_comes_when_the_one_before_has_ended_and_the_pause_is_over() -> None:
    trace = turns(("a", 0, 3, None), ("a", 0.5, 2, 0.25), ("b", 1, 1, None), ("a", 9, 1, 0.0))
    found = spans(simulate(trace, FCFS(), A_SECOND_A_STEP))
    # r0 runs from 0 to 3, r1 comes at 3.25 and runs for two steps; r2 shares the step from 1 on.
    assert found == {"r0": (0, 3), "r2": (1, 2), "r1": (3.25, 5.25), "r3": (5.25, 6.25)}


def test_a_turn_whose_first_turn_was_cut_off_comes_at_its_own_time() -> None:
    trace = turns(("a", 0, 1, None), ("b", 2.5, 1, 7.0))
    assert spans(simulate(trace, FCFS(), A_SECOND_A_STEP))["r1"] == (2.5, 3.5)


def test_a_turn_may_go_to_another_replica_than_the_one_before() -> None:
    trace = turns(("a", 0, 2, None), ("b", 0, 2, None), ("a", 0, 2, 0.5), ("b", 0, 1, 0.25))
    fleet = [*make_replicas(1), *make_replicas(1, TWO_SECONDS_A_STEP)]
    found = spans(simulate_fleet(trace, FCFS(), fleet, RoundRobin()))
    # Both first turns end at 2 and 4; r2 goes to the fast replica at 2.5, r3 to the slow one.
    assert found == {"r0": (0, 2), "r1": (0, 4), "r2": (2.5, 4.5), "r3": (4.25, 6.25)}


def test_a_turn_that_does_not_finish_breaks_its_session() -> None:
    trace = turns(("a", 0, 1, None), ("a", 0, 9, 0.0), ("a", 0, 1, 0.0), ("b", 0, 1, None))
    config = SimulationConfig(client_timeout_s=4.0)
    requests = simulate(trace.with_program_deadlines(60.0), FCFS(), A_SECOND_A_STEP, config)
    by_id = {r.request_id: r for r in requests}
    assert by_id["r1"].end_reason is EndReason.CLIENT
    assert by_id["r2"].status is RequestStatus.ABORTED
    assert by_id["r2"].arrival_s == by_id["r2"].end_s == by_id["r1"].end_s == 5.0
    assert not by_id["r2"].token_times_s
    summary = summarize(records_of(requests, DeadlineRule.TBT), DeadlineRule.TBT)
    assert (summary.num_programs, summary.program_attainment) == (2, 0.5)


def test_a_session_of_thousands_of_turns_breaks_as_a_short_one_does() -> None:
    trace = turns(("a", 0, 9, None), *[("a", 0, 1, 0.0)] * 3000)
    requests = simulate(trace, FCFS(), A_SECOND_A_STEP, SimulationConfig(client_timeout_s=4.0))
    assert {(r.status, r.end_s) for r in requests} == {(RequestStatus.ABORTED, 4.0)}


@pytest.mark.parametrize(("program_s", "share"), [(6.2, 0.0), (6.25, 1.0)])
def test_a_program_is_on_time_by_its_last_token(program_s: float, share: float) -> None:
    trace = turns(("a", 0, 3, None), ("a", 0, 3, 0.25), program_s=program_s)
    records = records_of(simulate(trace, FCFS(), A_SECOND_A_STEP), DeadlineRule.TBT)
    assert summarize(records, DeadlineRule.TBT).program_attainment == share


def test_without_programs_their_attainment_is_unknown() -> None:
    trace = turns(("a", 0, 1, None))
    records = records_of(simulate(trace, FCFS(), A_SECOND_A_STEP), DeadlineRule.TBT)
    assert math.isnan(summarize(records, DeadlineRule.TBT).program_attainment)


@pytest.mark.parametrize("name", ["fcfs", "goodput", "edf:drop=expired", "vllm_v1"])
def test_grouped_steps_and_single_steps_give_the_same_to_the_bit(name: str) -> None:
    model, trace = load_model("h100/llama-3.1-8b"), small_agents()
    grouped = simulate(trace, make_policy(name), model, CONFIG)
    single = simulate(trace, make_policy(name), model, CONFIG, on_step=lambda _: None)
    rows = simulate(trace, make_policy(name), model, CONFIG, on_row=lambda *_: None)
    assert fates(grouped) == fates(single) == fates(rows)


@pytest.mark.parametrize("name", ROUTERS)
def test_one_replica_behind_any_router_is_the_plain_simulator(name: str) -> None:
    model, trace = load_model("h100/llama-3.1-8b"), small_agents(60)
    plain = simulate(trace, make_policy("goodput"), model, CONFIG)
    fleet = [ReplicaKind(model, CONFIG)]
    assert fates(simulate_fleet(trace, make_policy("goodput"), fleet, ROUTERS[name]())) == fates(
        plain
    )


@pytest.mark.parametrize("name", ["round_robin", "prefix_affine"])
def test_every_turn_ends_once_although_replicas_fail(name: str) -> None:
    model, trace = load_model("h100/llama-3.1-8b"), small_agents()
    fleet = [ReplicaKind(model, CONFIG)] * 3
    whole = simulate_fleet(trace, FCFS(), fleet, ROUTERS[name](), FleetConfig(0.05))
    at_s = whole[30].token_times_s[5]  # until then nothing differs, so this one is answering
    failures = tuple(Failure(at_s, index) for index in range(3))
    config = FleetConfig(0.05, failures, startup_s=0.5)
    requests = simulate_fleet(trace, FCFS(), fleet, ROUTERS[name](), config)
    assert sorted(r.request_id for r in requests) == sorted(r.request_id for r in trace.requests)
    assert all(r.status.is_ended and r.end_s is not None for r in requests)
    assert any(r.end_reason is EndReason.FAULT for r in requests)
    by_session: dict[str | None, list[Request]] = {}
    for request in sorted(requests, key=lambda r: int(r.request_id)):
        by_session.setdefault(request.session_id, []).append(request)
    for session in by_session.values():
        finished = [r.status is RequestStatus.FINISHED for r in session]
        assert finished == sorted(finished, reverse=True)  # nothing follows a break
        for before, after in pairwise(session):
            assert before.end_s is not None
            assert after.arrival_s >= before.end_s


@pytest.mark.parametrize("fails_s", [0.5, 1.0])
def test_a_turn_that_is_sent_again_does_not_break_its_session(fails_s: float) -> None:
    trace = turns(("a", 0, 2, None), ("a", 0, 2, 0.25))
    config = FleetConfig(failures=(Failure(fails_s, 0),))
    requests = simulate_fleet(trace, FCFS(), make_replicas(2), RoundRobin(), config)
    # r0 is prefilled on replica 0 from 0 to 1; replica 1 begins it anew when replica 0 fails.
    assert spans(requests) == {"r0": (0, fails_s + 2), "r1": (fails_s + 2.25, fails_s + 4.25)}
    assert all(r.status is RequestStatus.FINISHED for r in requests)


def test_gaps_become_pauses_without_the_time_of_the_answers() -> None:
    trace = synthesize("sessions", num_requests=300, sessions=replace(SMALL, tpot_s=0.03), seed=1)
    open_s = {r.request_id: r.arrival_s for r in trace.requests}
    last: dict[str | None, TraceRequest] = {}
    for request in trace.closed_loop(0.03).requests:
        before = last.get(request.session_id)
        last[request.session_id] = request
        assert (request.think_s is None) == (before is None)
        if before is not None:
            gap_s = open_s[request.request_id] - open_s[before.request_id]
            assert request.think_s == pytest.approx(max(0.0, gap_s - 12 * 0.03), abs=1e-5)
    with pytest.raises(TraceError, match="names no sessions"):
        synthesize("poisson", num_requests=5).closed_loop(0.03)


def test_a_program_may_take_what_its_turns_may_and_its_pauses() -> None:
    trace = turns(("a", 0, 3, None), ("a", 0, 11, 4.0), ("b", 1, 1, None))
    promised = trace.with_slo(SLO(2.0, 0.5)).with_program_deadlines(10.0, 2.0)
    assert {r.session_id: r.program_s for r in promised.requests} == {
        "a": 10 + 2 * (2 + 2 * 0.5 + 2 + 10 * 0.5) + 4,
        "b": 14,
    }
    with pytest.raises(TraceError, match="no TTFT or no TPOT"):
        trace.with_program_deadlines(0.0, 1.0)
    with pytest.raises(TraceError, match="needs sessions"):
        synthesize("poisson", num_requests=5).with_program_deadlines(10.0)


def test_a_program_may_take_the_pauses_before_turns_that_arrive_at_their_own_time() -> None:
    trace = turns(("a", 0, 3, None), ("a", 2, 3, None), ("a", 30, 3, None), ("b", 1, 1, None))
    promised = trace.with_slo(SLO(2.0, 0.5)).with_program_deadlines(0.0, 1.0)
    # Each turn may take 3 s: the second comes before the first has to end, the third 24 s after
    # the second has to.
    assert {r.session_id: r.program_s for r in promised.requests} == {"a": 3 + 3 + 24 + 3, "b": 2}
    assert {r.program_s for r in trace.with_program_deadlines(10.0).requests} == {40, 10}
    requests = simulate(trace.with_program_deadlines(7.0), FCFS(), A_SECOND_A_STEP)
    records = records_of(requests, DeadlineRule.TBT)
    assert summarize(records, DeadlineRule.TBT).program_attainment == 1.0


def test_a_pause_before_the_first_turn_that_is_left_of_a_session_is_not_its_programs() -> None:
    cut = turns(("a", 5, 1, 60.0), ("a", 6, 1, 2.0)).with_program_deadlines(10.0)
    assert {r.program_s for r in cut.requests} == {12}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_files_keep_pauses_and_programs(tmp_path, suffix: str) -> None:
    trace = small_agents(40)
    write_trace(trace, tmp_path / f"t.{suffix}")
    assert read_trace(tmp_path / f"t.{suffix}").requests == trace.requests


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"think_s": 1.0, "session_id": None}, "give it a session_id too"),
        ({"think_s": -1.0}, "needs a finite think_s >= 0"),
        ({"think_s": 1.0, "n": 2}, "has one answer"),
    ],
)
def test_a_turn_that_makes_no_sense_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replace(TraceRequest("r", 0.0, 8, 1, session_id="a"), **wrong)  # type: ignore[arg-type]


def test_stored_results_of_open_and_closed_loops_are_kept_apart() -> None:
    trace = synthesize("sessions", num_requests=20, sessions=SMALL)
    closed = trace.closed_loop(0.03)
    digests = {trace_digest(t) for t in (trace, closed, closed.with_program_deadlines(9.0))}
    assert len(digests) == 3


def test_agents_are_like_the_published_ones() -> None:
    trace = synthesize("agents", num_requests=4000, seed=2)
    row = trace.summary()
    assert row["prefix_hit_rate"] == pytest.approx(0.96, abs=0.01)
    prompts = {r.session_id: [] for r in trace.requests}
    for request in trace.requests:
        prompts[request.session_id].append(request.num_prompt_tokens)
    at_43 = [p[42] for p in prompts.values() if len(p) >= 43]
    assert sum(at_43) / len(at_43) == pytest.approx(142_000, rel=0.1)


@pytest.mark.parametrize("play", ["alone", "fleet"])
def test_a_turn_that_would_be_late_is_served_late_for_the_sake_of_its_program(play: str) -> None:
    """The second turn of "a" waits behind a long answer for longer than its TTFT.

    The first turn of "c", which does so, too, is rejected.
    """
    trace = turns(("a", 0, 1, None), ("b", 1.5, 4, None), ("a", 0, 1, 1.0), ("c", 2.2, 1, None))
    trace = trace.with_slo(SLO(1.5, 9.0)).with_program_deadlines(60.0)

    def statuses(trace: Trace) -> dict[str, RequestStatus]:
        config = SimulationConfig(limits=Limits(max_num_seqs=1))
        policy = FCFS(drop=Drop.INFEASIBLE)
        if play == "alone":
            requests = simulate(trace, policy, A_SECOND_A_STEP, config)
        else:
            replica = ReplicaKind(A_SECOND_A_STEP, config)
            requests = simulate_fleet(trace, policy, [replica], RoundRobin())
        rule = DeadlineRule.MEAN_TPOT
        # A turn that is relegated is late by what it asked for.
        assert summarize(list(records_of(requests, rule)), rule).num_good == 2
        return {request.request_id: request.status for request in requests}

    done, rejected = RequestStatus.FINISHED, RequestStatus.REJECTED
    assert statuses(trace) == {"r0": done, "r1": done, "r2": done, "r3": rejected}
    strict = trace.with_on_infeasible(OnInfeasible.REJECT)
    assert statuses(strict) == {"r0": done, "r1": done, "r2": rejected, "r3": rejected}
