"""goodput against examples worked by hand, and its order against every order there is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

import pytest
from factories import make_model, make_request
from hypothesis import given
from hypothesis import strategies as st
from views import R, flat_model, view_of

from slosched.core import EndReason, Limits, Request
from slosched.policy.goodput import Goodput, Timed, most_in_time
from slosched.policy.spec import PolicySpecError, make_policy

MODEL = flat_model()
"""5 ms + 50 us a token: a prefill of 100 tokens takes 10 ms, of 300 20 ms, of 500 30 ms."""


def tokens_of(*requests: R, **fields: int) -> dict[str, int]:
    return dict(Goodput(**fields).schedule(view_of(requests)).num_scheduled_tokens)


def timed(requests: Iterable[Request]) -> list[Timed]:
    return [(r, MODEL.predict_prefill(r.num_prompt_tokens)) for r in requests]


def test_moore_and_hodgson_send_the_longest_back() -> None:
    """10 ms due at 12, 30 due at 40, 20 due at 45: all three end at 60, without the 30 at 30."""
    view = view_of([R("a", 100, 0.012), R("b", 500, 0.040), R("c", 300, 0.045)])
    ordered = most_in_time(timed(view.waiting), start_s=0.0, share=1.0)
    assert [r.request_id for r in ordered] == ["a", "c", "b"]


def make_waiting(jobs: list[tuple[int, int]]) -> list[Request]:
    """(prompt tokens, milliseconds until its first token is due) of each."""
    requests = [make_request(f"r{i}", tokens) for i, (tokens, _) in enumerate(jobs)]
    for request, (_, due_ms) in zip(requests, jobs, strict=True):
        request.deadline_s = due_ms / 1e3
    return requests


def num_in_time(ordered: list[Request], share: float) -> int:
    now_s, num = 0.0, 0
    for request in ordered:
        after_s = now_s + MODEL.predict_prefill(request.num_prompt_tokens) / share
        if after_s <= request.deadline_s:
            now_s, num = after_s, num + 1
    return num


@given(
    st.lists(st.tuples(st.integers(1, 800), st.integers(1, 120)), max_size=5),
    st.sampled_from([0.25, 0.5, 1.0]),
)
def test_no_order_has_more_in_time(jobs: list[tuple[int, int]], share: float) -> None:
    requests = make_waiting(jobs)
    ordered = most_in_time(timed(requests), 0.0, share)
    assert sorted(r.request_id for r in ordered) == sorted(r.request_id for r in requests)
    best = max(num_in_time(list(order), share) for order in permutations(requests))
    assert num_in_time(ordered, share) == best


def test_what_cannot_be_in_time_even_alone_is_rejected() -> None:
    """100 tokens take 10 ms; 9 are left.  The other has 11."""
    output = Goodput().schedule(view_of([R("late", 100, 0.009), R("timely", 100, 0.011)]))
    assert output.rejected == {"late": EndReason.INFEASIBLE}
    assert dict(output.num_scheduled_tokens) == {"timely": 100}


def test_a_cut_chunk_ends_with_a_whole_tile() -> None:
    """95 % of the decode's 30 ms are time for 469 tokens, of which 448 are seven tiles."""
    decode = R("decode", 11, 0.030, out=1)
    assert tokens_of(decode, R("long", 1000, 9.0)) == {"decode": 1, "long": 447}


def test_there_is_always_time_for_a_small_chunk() -> None:
    """The decode has 6 ms; 128 tokens more than it take 11.45."""
    decode = R("decode", 11, 0.006, out=1)
    assert tokens_of(decode, R("long", 1000, 9.0)) == {"decode": 1, "long": 127}
    assert tokens_of(decode, R("long", 1000, 9.0), floor_tokens=256)["long"] == 255


def test_decodes_leave_prefills_a_share_of_the_device() -> None:
    """A step of the decode alone, 5.05 ms, is due every 10: prefills have half the device.

    Then "first", 10 ms alone, ends after 5.05 + 20.2 ms and is late; with the whole device it
    would not be.  "second" ends in its place, in time.
    """
    decode = R("decode", 11, 0.010, tpot_s=0.010, out=1)
    first, second = R("first", 100, 0.024), R("second", 100, 0.040)
    assert list(tokens_of(decode, first, second)) == ["decode", "second", "first"]
    slower = R("decode", 11, 0.010, tpot_s=1.0, out=1)
    assert list(tokens_of(slower, first, second)) == ["decode", "first", "second"]


def test_seats_and_memory_bound_it() -> None:
    requests = [R("decode", 11, 9.0, out=1), R("a", 50, 8.0), R("b", 50, 9.0)]
    seats = view_of(requests, limits=Limits(max_num_batched_tokens=1000, max_num_seqs=2))
    assert list(Goodput().schedule(seats).num_scheduled_tokens) == ["decode", "a"]
    memory = view_of(requests, num_blocks=70)  # one token each: 10 held, 1 + 50 taken, 9 left
    assert list(Goodput().schedule(memory).num_scheduled_tokens) == ["decode", "a"]


@pytest.mark.parametrize(
    "option", ["margin=1", "margin=-0.1", "floor_tokens=0", "min_share=0", "min_share=2"]
)
def test_a_bad_option_is_named(option: str) -> None:
    with pytest.raises(PolicySpecError, match=option.partition("=")[0]):
        make_policy(f"goodput:{option}")


def test_it_needs_a_latency_model() -> None:
    view = view_of([R("a", 100, 1.0)], make_model())
    with pytest.raises(ValueError, match="latency model"):
        Goodput().schedule(
            type(view)(**{n: getattr(view, n) for n in view.__slots__} | {"latency_model": None})
        )
