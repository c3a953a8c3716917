"""Synthetic conversations: what their turns share, when they arrive, and how many there are."""

from itertools import groupby, pairwise

import numpy as np
import pytest

from slosched.core import SLO
from slosched.workload import Trace, TraceRequest, synthesize
from slosched.workload.lengths import Fixed
from slosched.workload.sessions import Sessions

FIXED = Sessions(question=Fixed(100), answer=Fixed(200), system_tokens=40, num_system_prompts=3)


def by_session(requests: tuple[TraceRequest, ...]) -> list[list[TraceRequest]]:
    ordered = sorted(requests, key=lambda r: (int(str(r.session_id)), r.arrival_s))
    return [list(turns) for _, turns in groupby(ordered, key=lambda r: r.session_id)]


def test_a_turn_repeats_all_that_was_said_before():
    trace = synthesize("sessions", num_requests=2000, sessions=FIXED)
    assert trace.prefix_block_tokens == 16
    pairs = [pair for turns in by_session(trace.requests) for pair in pairwise(turns)]
    assert len(pairs) > 1000
    for before, after in pairs:
        assert after.num_prompt_tokens == before.num_prompt_tokens + 200 + 100
        assert after.prefix_hashes[: len(before.prefix_hashes)] == before.prefix_hashes
        assert len(after.prefix_hashes) == after.num_prompt_tokens // 16


def test_sessions_share_their_system_prompt_and_nothing_else():
    trace = synthesize("sessions", num_requests=2000, sessions=FIXED)
    firsts = [turns[-1].prefix_hashes for turns in by_session(trace.requests)]
    # System prompts of 40 tokens have two full blocks; the third one differs for each session.
    assert {hashes[:2] for hashes in firsts} == {(0, 1), (2, 3), (4, 5)}
    own = [block for hashes in firsts for block in hashes[2:]]
    assert len(own) == len(set(own))


def test_the_next_question_waits_for_the_answer_and_a_thought():
    trace = synthesize("sessions", num_requests=20_000, rate=5.0, sessions=FIXED)
    gaps_s = np.array(
        [b.arrival_s - a.arrival_s for t in by_session(trace.requests) for a, b in pairwise(t)]
    )
    assert gaps_s.min() > 0.9 * 200 * 0.03  # all times are scaled to meet the rate
    assert gaps_s.mean() == pytest.approx(200 * 0.03 + 30, rel=0.05)


def test_sessions_are_as_many_and_as_long_at_the_start_as_later():
    trace = synthesize("sessions", num_requests=20_000, rate=5.0)
    assert trace.rate == pytest.approx(5.0)
    halves = np.array_split(trace.prompt_tokens, 2)
    assert halves[0].mean() == pytest.approx(halves[1].mean(), rel=0.05)
    assert trace.window(0, 1000).rate == pytest.approx(5.0, rel=0.1)
    assert trace.summary()["turns_mean"] == pytest.approx(4.0, rel=0.03)


def test_a_conversation_ends_where_its_prompt_would_be_too_long():
    short = Sessions(question=Fixed(100), answer=Fixed(200), max_prompt_tokens=1000, mean_turns=50)
    trace = synthesize("sessions", num_requests=500, sessions=short)
    assert trace.prompt_tokens.max() == 512 + 100 + 300


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"mean_turns": 0.5}, "mean_turns must be finite and at least 1, not 0.5"),
        ({"think_s": -1.0}, "think_s"),
        ({"tpot_s": float("nan")}, "tpot_s"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"system_tokens": 40_000}, "system_tokens must be .* less than max_prompt_tokens"),
    ],
)
def test_conversations_that_cannot_be_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        Sessions(**wrong)


def test_a_rate_for_which_too_many_sessions_would_have_begun_is_refused():
    with pytest.raises(ValueError, match=r"at 1e\+09 requests/s, [0-9.]+e\+11 sessions.* scale"):
        synthesize("sessions", num_requests=100, rate=1e9)
    assert synthesize("agents", num_requests=100, rate=1e9).rate == pytest.approx(1e9)


def program_times(trace: Trace) -> list[float | None]:
    return [r.program_s for r in trace.requests]


@pytest.mark.parametrize("factor", [0.0, 1.5])
@pytest.mark.parametrize("speed", [0.01, 0.5, 3.0, 200.0])
def test_the_time_of_a_program_follows_the_times_at_which_its_turns_arrive(factor, speed):
    trace = synthesize("sessions", num_requests=60, seed=2).with_slo(SLO(1.0, 0.05))
    promised = trace.with_program_deadlines(20.0, factor)
    rate = speed * trace.rate
    for name, moved, bare in (
        ("scaled", promised.scaled_to(rate), trace.scaled_to(rate)),
        ("poisson", promised.with_poisson_arrivals(rate), trace.with_poisson_arrivals(rate)),
    ):
        anew = bare.with_program_deadlines(20.0, factor)
        assert program_times(moved) == pytest.approx(program_times(anew), abs=1e-6), name
        assert [r.slo for r in moved.requests] == [r.slo for r in trace.requests]


def test_the_time_of_a_program_stays_where_its_turns_wait_for_each_other():
    trace = synthesize("agents", num_requests=60, seed=2).with_program_deadlines(20.0)
    scaled = trace.scaled_to(3 * trace.rate)
    assert program_times(scaled) == program_times(trace)
    assert [r.think_s for r in scaled.requests] == [r.think_s for r in trace.requests]


def test_a_time_that_a_file_promises_keeps_what_is_left_after_the_last_arrival():
    def turn(name: str, arrival_s: float, program_s: float | None) -> TraceRequest:
        session = None if program_s is None else str(program_s)
        return TraceRequest(name, arrival_s, 10, 2, session_id=session, program_s=program_s)

    turns = [turn("a", 0, 50), turn("b", 4, 7), turn("c", 14, 7), turn("d", 40, 50)]
    trace = Trace.of([*turns, turn("e", 41, None)], "file")
    assert program_times(trace.scaled_to(2 * trace.rate)) == [30, 2, 2, 30, None]
    # Nobody could keep 7 s with a turn after 10 s, and that stays so.
    assert program_times(trace.scaled_to(trace.rate / 2)) == [90, 17, 17, 90, None]
    assert program_times(trace.scaled_to(100 * trace.rate)) == pytest.approx(
        [10.4, 0, 0, 10.4, None]
    )
