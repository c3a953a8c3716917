"""The index of those that wait answers as a look at each of them would."""

from __future__ import annotations

import math
from collections.abc import Iterable

import pytest
from factories import make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from slosched.core import Request, due_by, latest_first, longest_tokens
from slosched.policy.kit.remaining import Remaining
from slosched.scheduler.queues import InOrder, Queues

ARRIVES, STARTS, COMES_BACK, IS_EASED, LOSES_A_TOKEN, ASKS = range(6)


def names(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def check(queues: Queues, until_s: float) -> None:
    """Compare the answers about a queue with those about a tuple of the same requests."""
    queue, requests = InOrder(queues), tuple(queues.waiting.values())
    assert names(due_by(queue, until_s)) == names(due_by(requests, until_s)), "ties by place"
    assert longest_tokens(queue) == longest_tokens(requests)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(ARRIVES, ASKS),
            st.integers(0, 9),
            st.floats(0, 10) | st.integers(0, 3).map(float),
        ),
        max_size=200,
    )
)
def test_it_follows_all_that_happens_to_a_queue(
    events: list[tuple[int, int, float]],
) -> None:
    queues, away = Queues(), list[Request]()
    for number, (event, which, time_s) in enumerate(events):
        waiting = list(queues.waiting.values())
        if event == ARRIVES:
            request = make_request(f"r{number}", num_prompt_tokens=1 + which)
            request.deadline_s = time_s
            queues.put_last(request)
        elif event == STARTS and waiting:
            request = queues.waiting.pop(waiting[which % len(waiting)].request_id)
            away.append(request)
        elif event == COMES_BACK and away:  # preempted, with more tokens and another deadline
            request = away.pop(which % len(away))
            request.num_output_tokens += which
            request.deadline_s += time_s
            queues.put_first(request)
        elif event == IS_EASED and waiting:
            waiting[which % len(waiting)].deadline_s += time_s
        elif event == LOSES_A_TOKEN and waiting:  # one in flight, from before it was preempted
            request = waiting[which % len(waiting)]
            request.num_output_tokens = max(0, request.num_output_tokens - 1)
        elif event == ASKS:
            check(queues, time_s)
    check(queues, 5.0)


def test_of_those_due_at_the_same_time_the_first_in_the_queue_comes_first() -> None:
    """Whatever their names are; a preempted one has come back in front of all others."""
    queues = Queues()
    queues.put_last(make_request("c"))
    queues.put_last(make_request("b"))
    queues.put_first(make_request("d"))
    assert names(due_by(InOrder(queues), math.inf)) == ["d", "c", "b"]
    queues.put_last(make_request("a"))
    queues.put_first(make_request("e"))
    assert names(due_by(InOrder(queues), math.inf)) == ["e", "d", "c", "b", "a"]


@pytest.mark.parametrize("num_leaving", [0, 300, 1000])
def test_what_is_kept_of_those_that_left_is_bounded(num_leaving: int) -> None:
    queues = Queues()
    for number in range(1000):
        queues.put_last(make_request(f"r{number}", num_prompt_tokens=1 + number % 7))
        check(queues, 0.0)
    for number in range(num_leaving):
        del queues.waiting[f"r{number}"]
    check(queues, 0.0)
    for entries in (queues.index._lengths._entries, queues.index._deadlines._entries):
        assert entries is not None
        assert len(entries) <= 2 * (1000 - num_leaving) + 64


def test_nothing_is_kept_where_nobody_asks() -> None:
    queues = Queues()
    queues.put_last(make_request())
    assert queues.index._lengths._entries is None
    assert queues.index._deadlines._entries is None


def test_nothing_grows_where_nobody_asks_any_more() -> None:
    queues = Queues()
    for number in range(10_000):
        queues.put_last(make_request(f"r{number}"))
        if number == 10:
            check(queues, 0.0)
        if number > 20:
            del queues.waiting[f"r{number}"]
    assert queues.index._lengths._entries is None
    assert queues.index._deadlines._entries is None
    check(queues, math.inf)


def test_what_a_step_rejects_is_not_due() -> None:
    queues = Queues()
    for number in range(4):
        queues.put_last(make_request(f"r{number}", num_prompt_tokens=1 + number))
    remaining = Remaining(InOrder(queues), {"r1", "r3"})
    assert names(due_by(remaining, math.inf)) == ["r0", "r2"]
    assert longest_tokens(remaining) >= 3


def test_some_may_be_left_out_twice() -> None:
    queues = Queues()
    for number in range(6):
        queues.put_last(make_request(f"r{number}"))
    once = Remaining(InOrder(queues), {"r1"})
    twice = Remaining(once, {"r1", "r4"})
    assert len(once) == 5
    assert names(twice) == ["r0", "r2", "r3", "r5"]
    assert len(twice) == 4
    assert names(latest_first(twice)) == names(reversed(twice)) == ["r5", "r3", "r2", "r0"]
    assert names(twice[1:3]) == ["r2", "r3"]
    assert twice
    assert not Remaining(once, {"r0", "r2", "r3", "r4", "r5"})


def test_of_nobody_there_is_no_longest() -> None:
    assert longest_tokens(()) == longest_tokens(InOrder(Queues())) == 0
    assert due_by((), 1.0) == due_by(InOrder(Queues()), 1.0) == []
