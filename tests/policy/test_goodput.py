"""goodput against examples worked by hand, and its order against every possible order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Self
from zlib import crc32

import pytest
from factories import make_model, make_request
from hypothesis import given
from hypothesis import strategies as st
from views import R, flat_model, view_of

from slosched.core import SLO, BatchShape, DeadlineRule, EndReason, LatencyModel, Limits, Request
from slosched.metrics import RequestRecord, is_good
from slosched.perfmodel import LinearModel, load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.late_gaps import starving_tpot_s
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import (
    Order,
    Supply,
    Timed,
    best_order,
    by_deadline,
    most_in_time,
    most_urgent_of_short,
)
from slosched.policy.kit.shortage import Shortage
from slosched.policy.spec import PolicySpecError, make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Trace, TraceRequest

MODEL = flat_model()
"""5 ms + 50 us a token: a prefill of 100 tokens takes 10 ms, of 300 20 ms, of 500 30 ms."""


def tokens_of(
    *requests: R, rule: DeadlineRule = DeadlineRule.MEAN_TPOT, **fields: float
) -> dict[str, int]:
    view = view_of(requests, limits=Limits(deadline_rule=rule))
    return dict(Goodput(**fields).schedule(view).num_scheduled_tokens)


def timed(requests: Iterable[Request]) -> list[Timed]:
    return by_deadline((r, MODEL.predict_prefill(r.num_prompt_tokens)) for r in requests)


def names(requests: Iterable[Request]) -> list[str]:
    return [r.request_id for r in requests]


def test_moore_and_hodgson_send_the_longest_back() -> None:
    """Prompts of 10 ms due at 12, 30 due at 40, 20 due at 45: all three end at 60, without the 30
    at 30."""
    view = view_of([R("a", 100, 0.012), R("b", 500, 0.040), R("c", 300, 0.045)])
    order = most_in_time(timed(view.waiting), Supply(0.0))
    assert (names(order.in_time), names(order.late)) == (["a", "c"], ["b"])


def test_short_prompts_are_looked_at_however_many_long_ones_came_before_them() -> None:
    """Each of 300 long ones takes 55 ms, and each of ten short ones 10 ms; all are due at 200 ms."""
    long = [R(f"long {i}", 1000, 0.2) for i in range(300)]
    short = [R(f"short {i}", 100, 0.2) for i in range(10)]
    assert tokens_of(*long, *short).keys() >= {request.name for request in short}


def test_beside_the_most_urgent_shorter_ones_are_looked_at_in_place_of_those_too_long() -> None:
    """Of 400 prompts each second one has 900 tokens, the others 100; the last is due in 400 s."""
    waiting = view_of([R(f"r{i}", 900 if i % 2 else 100, 1.0 + i) for i in range(400)]).waiting

    def looked_at(tokens_per_s: float) -> list[str]:
        return names(most_urgent_of_short(waiting, 0.0, tokens_per_s))

    later = [f"r{i}" for i in range(256, 400, 2)]
    assert looked_at(1000.0) == [], "there is time for all"
    assert looked_at(100.0) == later, "there is time for all short ones and 22 long ones"
    assert looked_at(49.0) == [], "there is not even time for all short ones"


def test_many_prompts_of_one_length_are_looked_at_by_deadline_alone() -> None:
    waiting = view_of([R(f"r{i}", 100, 1.0) for i in range(400)]).waiting
    assert names(most_urgent_of_short(waiting, 0.0, 1000.0)) == []


def test_how_many_are_good_of_those_that_come_at_once_hardly_depends_on_their_order() -> None:
    """Each of 300 long prompts takes as long as 20 of the 300 short ones."""

    def num_good(lengths_tokens: list[int]) -> int:
        slo = SLO(ttft_s=2.0, tpot_s=0.05)
        rows = [TraceRequest(f"r{i}", 0.0, n, 50, slo) for i, n in enumerate(lengths_tokens)]
        model = load_model("h100/llama-3.1-8b")
        config = SimulationConfig(num_blocks=20_000)
        ended = simulate(Trace.of(rows, "at once"), Goodput(), model, config)
        records = map(RequestRecord.from_request, ended)
        return sum(is_good(record, DeadlineRule.MEAN_TPOT) for record in records)

    short, long = [100] * 300, [4000] * 300
    assert num_good([*long, *short]) > 0.6 * num_good([*short, *long])


def test_a_prompt_whose_tpot_no_step_is_short_enough_for_is_rejected_as_it_arrives() -> None:
    """A step takes at least 5.05 ms."""
    hasty, other = R("hasty", 300, 0.060, tpot_s=0.005), R("other", 600, 0.070)
    output = Goodput().schedule(view_of([hasty, other]))
    assert output.rejected == {"hasty": EndReason.UNKEEPABLE}
    assert output.num_scheduled_tokens == {"other": 600}
    assert not Goodput().schedule(view_of([replace(hasty, tpot_s=0.006), other])).rejected


def test_under_envelope_such_a_prompt_goes_last_since_its_ttft_may_make_up_for_its_tpot() -> None:
    """Both prompts take 50.05 ms together, and one is due at 40."""
    first, second = R("first", 300, 0.030, tpot_s=0.005), R("second", 600, 0.040)
    rule = DeadlineRule.ENVELOPE
    assert tokens_of(first, second, rule=rule)["second"] == 600
    assert tokens_of(replace(first, tpot_s=0.006), second, rule=rule)["first"] == 300
    later = replace(first, due_s=0.060), replace(second, due_s=0.070)
    both_in_time = tokens_of(*later, rule=rule)
    assert both_in_time == {"first": 300, "second": 600}, "it is served where there is time"


def test_fairness_sends_back_who_takes_longest_for_its_length() -> None:
    """10 ms for 100 tokens and 40 ms for 700, both due at 45: 0.10 and 0.057 ms a token."""
    view = view_of([R("short", 100, 0.045), R("long", 700, 0.045)])
    assert names(most_in_time(timed(view.waiting), Supply(0.0)).late) == ["long"]
    assert names(most_in_time(timed(view.waiting), Supply(0.0), fairness=1.0).late) == ["short"]


@given(
    st.lists(st.tuples(st.integers(1, 800), st.integers(1, 120)), max_size=12),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
)
def test_more_fairness_never_makes_a_safe_prompt_unsafe(
    jobs: list[tuple[int, int]], one: float, other: float
) -> None:
    """No safe prompt is sent back while an unsafe one is left."""
    requests = make_waiting(jobs)
    fairness, more = sorted((one, other))
    drawn = {r.request_id: crc32(r.request_id.encode()) / 2**32 for r in requests}
    safe = {share: {i for i, draw in drawn.items() if draw < share} for share in (fairness, more)}
    assert safe[fairness] <= safe[more]
    order = most_in_time(timed(requests), Supply(0.0), more)
    alone = [r for r in requests if r.request_id in safe[more]]
    least = most_in_time(timed(alone), Supply(0.0), 1.0)
    kept = [r for r in order.in_time if r.request_id in safe[more]]
    assert names(kept) == names(least.in_time)


def make_waiting(jobs: list[tuple[int, int]]) -> list[Request]:
    """Return requests made from pairs of prompt tokens and milliseconds until the first token is
    due."""
    requests = [make_request(f"r{i}", tokens) for i, (tokens, _) in enumerate(jobs)]
    for request, (_, due_ms) in zip(requests, jobs, strict=True):
        request.deadline_s = due_ms / 1e3
    return requests


def test_a_prompt_that_gets_no_seat_in_time_is_late() -> None:
    """Prompts of 10 and 20 ms are due at 45.  The first gets the free seat, and the next seat comes
    after 20 ms."""
    view = view_of([R("a", 100, 0.045), R("b", 300, 0.045)])
    assert not most_in_time(timed(view.waiting), Supply(0.0, 1.0, 1, 0.015)).late
    assert names(most_in_time(timed(view.waiting), Supply(0.0, 1.0, 1, 0.020)).late) == ["b"]


def test_where_seats_are_scarce_prompts_go_by_length() -> None:
    """There is time for all, but only two find a seat before they are due."""
    view = view_of([R("long", 500, 0.2), R("short", 100, 0.21), R("middle", 300, 0.22)])
    order = best_order(timed(view.waiting), Supply(0.0, 1.0, 1, 0.1))
    assert (names(order.in_time), names(order.late)) == (["short", "middle"], ["long"])
    by_deadline_alone = best_order(timed(view.waiting), Supply(0.0, 1.0))
    assert names(by_deadline_alone.in_time) == ["long", "short", "middle"]


def test_while_few_are_late_for_want_of_seats_prompts_go_by_deadline() -> None:
    """Three seats are free and one more comes in time, so the longest of five finds none."""
    lengths = [300, 100, 200, 100, 500]
    view = view_of([R(f"r{i}", n, 0.2 + i / 1e3) for i, n in enumerate(lengths)])
    order = best_order(timed(view.waiting), Supply(0.0, 1.0, 3, 0.1))
    assert (names(order.in_time), names(order.late)) == (["r0", "r1", "r2", "r3"], ["r4"])


def test_seats_come_free_as_often_as_decodes_that_follow_one_another_end() -> None:
    """100 decodes, each two tokens ahead of the next, stay for 200 tokens: one ends every other
    step."""
    decodes = [R(f"d{i}", 2 + 2 * i, 1.0, out=1 + 2 * i) for i in range(100)]
    pace = Pace.of(view_of(decodes).running, MODEL, 0.0)
    assert pace.seat_s(sum(r.out for r in decodes)) == pytest.approx(2 * pace.all_s)
    assert Pace.of([], MODEL, 0.0).seat_s(0) == 0.0


def test_a_prompt_that_has_begun_has_its_seat() -> None:
    view = view_of([R("begun", 300, 0.045, done=200), R("waiting", 100, 0.046)])
    prompts = [(view.running[0], 0.005), (view.waiting[0], 0.010)]
    order = most_in_time(prompts, Supply(0.0, 1.0, 0, 0.035))
    assert (names(order.in_time), names(order.late)) == (["begun"], ["waiting"])


def num_in_time(ordered: list[Request], supply: Supply) -> int:
    """Return how many are in time one after the other; those that would be late are skipped."""
    prefill_s, num = 0.0, 0
    for request in ordered:
        after_s = prefill_s + MODEL.predict_prefill(request.num_prompt_tokens)
        decodes_s = max(0, num + 1 - supply.num_free_seats) * supply.seat_s
        left_s = request.deadline_s
        if after_s <= supply.share * left_s and after_s + decodes_s <= left_s:
            prefill_s, num = after_s, num + 1
    return num


SUPPLIES = [Supply(0.0, share, *seats) for share in (0.25, 1.0) for seats in ((9, 0.0), (1, 0.02))]


@given(
    st.lists(st.tuples(st.integers(1, 800), st.integers(1, 120)), max_size=5),
    st.sampled_from(SUPPLIES),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_punctual_are_in_time_and_no_order_has_more(
    jobs: list[tuple[int, int]], supply: Supply, fairness: float
) -> None:
    requests = make_waiting(jobs)
    order = most_in_time(timed(requests), supply, fairness)
    assert sorted(names(order.in_time + order.late)) == sorted(names(requests))
    assert num_in_time(order.in_time, supply) == len(order.in_time)
    if not fairness:
        best = max(num_in_time(list(each), supply) for each in permutations(requests))
        assert len(order.in_time) == best


def test_what_cannot_be_in_time_even_alone_is_rejected() -> None:
    """100 tokens take 10 ms; one prompt has 9 ms left, the other 11."""
    output = Goodput().schedule(view_of([R("late", 100, 0.009), R("timely", 100, 0.011)]))
    assert output.rejected == {"late": EndReason.INFEASIBLE}
    assert dict(output.num_scheduled_tokens) == {"timely": 100}


def test_a_cut_chunk_ends_with_a_whole_tile() -> None:
    """45 ms minus 5 % of the TPOT of 50 leave time for 749 tokens, of which 704 are eleven tiles."""
    decode = R("decode", 11, 0.045, out=1)
    assert tokens_of(decode, R("long", 1000, 9.0)) == {"decode": 1, "long": 703}


def test_a_step_always_has_time_for_a_share_of_the_tpot() -> None:
    """The decode has 6 ms.  65 % of 50 ms are 32.5 ms, time for 549 tokens; 90 % leave time for
    799."""
    decode = R("decode", 11, 0.006, out=1)
    assert tokens_of(decode, R("long", 1000, 9.0)) == {"decode": 1, "long": 511}
    assert tokens_of(decode, R("long", 1000, 9.0), shortest=0.9)["long"] == 767


def test_a_late_decode_shortens_the_step_to_its_least() -> None:
    """The short step lets it catch up, since a mean TPOT forgives a slow step."""
    late, other = R("late", 11, -0.1, out=1), R("other", 11, 0.045, out=1)
    tokens = tokens_of(late, other, R("long", 1000, 9.0))
    assert tokens == {"late": 1, "other": 1, "long": 510}


def test_a_step_is_never_longer_than_a_tpot() -> None:
    """50 ms are time for 899 tokens, though no decode is due for a second."""
    decode = R("decode", 11, 1.0, out=1)
    assert tokens_of(decode, R("long", 1000, 9.0)) == {"decode": 1, "long": 895}


def test_a_step_ends_before_the_prompts_that_it_finishes_are_due() -> None:
    """The prompt "first" ends after 15.05 ms and is due at 30, so there is time for 298 tokens
    more."""
    decode, first = R("decode", 11, 1.0, out=1), R("first", 200, 0.030)
    tokens = tokens_of(decode, first, R("second", 900, 9.0))
    assert tokens == {"decode": 1, "first": 200, "second": 247}


def test_decodes_leave_prefills_a_share_of_the_device() -> None:
    """A step of only the decode, 5.05 ms, is due every 10 ms, so prefills have half of the device.

    "first" adds 5 ms to the steps.  So it ends after 5.05 + 10.1 ms and is late; with the whole
    device it would not be.  "second" goes in its place, in time.
    """
    decode = R("decode", 11, 0.010, tpot_s=0.010, out=1)
    first, second = R("first", 100, 0.014), R("second", 100, 0.040)
    assert list(tokens_of(decode, first, second)) == ["decode", "second"]
    slower = R("decode", 11, 0.010, tpot_s=1.0, out=1)
    assert list(tokens_of(slower, first, second)) == ["decode", "first", "second"]


def test_decodes_that_are_ahead_give_way_if_prompts_would_be_late() -> None:
    """Together they take 5.05, 34.4 and 55.6 ms, so "b" would be late.  "a" alone takes 30.95 and
    is due at 31.

    The decode is not due in the next two steps of 50 ms, so it may wait; the other may not.
    """
    a, b = R("a", 519, 0.040), R("b", 900, 0.060)
    ahead, due = R("decode", 11, 2.0, out=1), R("decode", 11, 0.09, out=1)
    assert list(tokens_of(ahead, a, b)) == ["a", "decode", "b"]
    assert list(tokens_of(due, a, b)) == ["decode", "a", "b"]
    assert list(tokens_of(ahead, a)) == ["decode", "a"], "nobody would be late"


def test_the_most_urgent_decodes_go_where_there_is_no_time_for_all() -> None:
    """9.5 ms are time for 89 of 100 decodes."""
    decodes = [R(f"d{i}", 11, 0.010 + i / 1e6, tpot_s=0.010, out=1) for i in range(100)]
    assert list(tokens_of(*reversed(decodes))) == [f"d{i}" for i in range(89)]


def test_late_decodes_are_not_served_a_few_at_a_time() -> None:
    """All take 17.5 ms, and the one with a TPOT of 12 ms allows for about 10.  If a hundred went in
    each such step, every one of them would pay its 5 ms, and ever more be late."""
    decodes = [R(f"d{i}", 11, -0.5, tpot_s=0.1, out=1) for i in range(249)]
    decodes.append(R("hasty", 11, 0.004, tpot_s=0.012, out=1))
    planned = tokens_of(*decodes, R("prompt", 300, 0.02))
    assert planned == {decode.name: 1 for decode in decodes}


def test_a_tpot_that_cannot_be_kept_shortens_no_step() -> None:
    """A decode takes 5.05 ms alone, and 8.25 ms beside a tile of a prompt.  So 5 and 8 ms cannot be
    kept, and the step is as long as the other decode allows; 9 ms are time for 79 tokens."""
    other, long = R("other", 11, 0.045, out=1), R("long", 1000, 9.0)
    for tpot_s in (0.005, 0.008):
        hasty = R("hasty", 11, tpot_s, tpot_s=tpot_s, out=1)
        assert tokens_of(hasty, other, long) == {"hasty": 1, "other": 1, "long": 702}
        assert tokens_of(replace(hasty, due_s=-1.0), other, long)["long"] == 702
    hasty = R("hasty", 11, 0.009, tpot_s=0.009, out=1)
    assert tokens_of(hasty, other, long) == {"hasty": 1, "other": 1, "long": 62}


def test_of_tiers_the_smallest_that_can_be_kept_sets_the_pace() -> None:
    """While the decodes of 10 ms run in every step, a fifth of those of 50 ms are due in it."""

    def pace(num_hasty: int, num_others: int) -> Pace:
        hasty = [R(f"h{i}", 11, -1.0, tpot_s=0.010, out=1) for i in range(num_hasty)]
        others = [R(f"o{i}", 11, 0.2, out=1) for i in range(num_others)]
        return Pace.of(view_of(hasty + others).running, MODEL, 0.0)

    kept, left_out = pace(10, 100), pace(20, 100)
    assert (kept.tpot_s, kept.first_slack_s) == (0.010, -1.0)
    assert kept.least_s == pytest.approx(0.005 + 50e-6 * (10 + 20 + 64))
    assert (left_out.tpot_s, left_out.first_slack_s) == (0.050, 0.2)
    assert left_out.steps_per_s == pytest.approx(1 / 0.050)


def test_if_nothing_can_be_kept_nothing_is_waited_for() -> None:
    """A decode alone takes 5.05 ms: 10 ms could be kept beside fewer others, 4 ms never."""
    crowd = [R(f"d{i}", 11, 0.010, tpot_s=0.010, out=1) for i in range(100)]
    assert Pace.of(view_of(crowd).running, MODEL, 0.0).tpot_s == 0.010
    never = [replace(r, tpot_s=0.004) for r in crowd]
    assert Pace.of(view_of(never).running, MODEL, 0.0).tpot_s == math.inf


class Counting(LinearModel):
    """A model that counts how often it is asked for the time of a step."""

    num_asked = 0

    def predict(self, shape: BatchShape) -> float:
        self.num_asked += 1
        return super().predict(shape)


@pytest.mark.parametrize("num", [2, 40, 400])
def test_the_smallest_tpot_that_is_kept_is_found_among_hundreds(num: int) -> None:
    """Each asks for a TPOT of its own, and it depends on the number of decodes which are kept.  To
    try all of them would take the square of their number in every step."""
    model = Counting(MODEL.coefficients)
    tpots_s = [0.006 + 0.030 * i / num for i in range(num)]
    decodes = [R(f"d{i}", 11, 9.0, tpot_s=tpot_s, out=1) for i, tpot_s in enumerate(tpots_s)]
    pace = Pace.of(view_of(decodes).running, model, 0.0)

    def with_tile_s(tpot_s: float) -> float:
        step = pace.due_within(tpot_s)
        step.add(64, 0)
        return MODEL.predict(step)

    assert pace.tpot_s == next(tpot_s for tpot_s in tpots_s if with_tile_s(tpot_s) < tpot_s)
    assert pace.least_s == with_tile_s(pace.tpot_s)
    starving_tpot_s(pace, model)
    assert model.num_asked < 30


def test_seats_and_memory_bound_it() -> None:
    requests = [R("decode", 11, 9.0, out=1), R("a", 50, 8.0), R("b", 50, 9.0)]
    seats = view_of(requests, limits=Limits(max_num_batched_tokens=1000, max_num_seqs=2))
    assert list(Goodput().schedule(seats).num_scheduled_tokens) == ["decode", "a"]
    memory = view_of(requests, num_blocks=70)  # one token each: 10 held, 1 + 50 taken, 9 left
    assert list(Goodput().schedule(memory).num_scheduled_tokens) == ["decode", "a"]


class Halves(PromptPack):
    """A packing that ends the prompt to be cut at half a tile of 64."""

    tile_tokens = 32


class LastFirst(Goodput):
    """A policy that serves the prompt that is due last, and only then decodes."""

    pack_class = Halves

    def order(self, shortage: Shortage) -> Order:
        *late, (last, _) = shortage.prompts
        return Order([last], [request for request, _ in late])

    def give_way(self, shortage: Shortage, order: Order, pack: PromptPack) -> None:
        pack.add(order.in_time)
        super().give_way(shortage, order._replace(in_time=[]), pack)


def test_a_subclass_may_replace_the_order_the_giving_way_and_the_packing() -> None:
    """Until "a" is due at 40 ms there is time for 699 tokens, in 50 ms for 899."""
    a, b = R("a", 519, 0.040), R("b", 900, 0.060)
    view = view_of((R("decode", 11, 0.2, out=1), a, b))
    assert Goodput().schedule(view).num_scheduled_tokens == {"a": 519, "decode": 1, "b": 120}
    last_first = LastFirst().schedule(view).num_scheduled_tokens
    assert list(last_first.items()) == [("b", 896), ("decode", 1)]


def test_a_subclass_may_replace_the_pace() -> None:
    """45 ms minus 2.5 are time for 749 tokens; with 10 ms less, 32.5 of 50 are time for 549."""

    class Hasty(Pace):
        """A pace that takes the first decode to be due 10 ms earlier."""

        @classmethod
        def of(
            cls, decodes: Sequence[Request], model: LatencyModel, now_s: float, num_lost: int = 0
        ) -> Self:
            return super().of(decodes, model, now_s + 0.010, num_lost)

    class InHaste(Goodput):
        pace_class = Hasty

    view = view_of((R("decode", 11, 0.045, out=1), R("long", 1000, 9.0)))
    assert Goodput().schedule(view).num_scheduled_tokens["long"] == 703
    assert InHaste().schedule(view).num_scheduled_tokens["long"] == 511


@pytest.mark.parametrize(
    "option", ["margin=1", "margin=-0.1", "shortest=0", "fairness=2", "min_share=0", "min_share=2"]
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


class Unsteady(LinearModel):
    """A model in which one step in a hundred takes 10 % more."""

    def predict_upper(self, shape: BatchShape) -> float:
        return 1.1 * self.predict(shape)


@pytest.mark.parametrize(
    ("rule", "tokens"), [(DeadlineRule.MEAN_TPOT, 62), (DeadlineRule.TBT, 638)]
)
def test_where_every_gap_counts_a_tpot_that_slow_steps_miss_keeps_no_prompt_out(
    rule: DeadlineRule, tokens: int
) -> None:
    """A tile beside the hasty decode takes 8.25 ms, or 9.33 if the step is slow; its TPOT is 8.6."""
    hasty, other = R("hasty", 11, 0.008, tpot_s=0.0086, out=1), R("other", 11, 0.045, out=1)
    limits = Limits(100_000, 100_000, deadline_rule=rule)
    requests = hasty, other, R("long", 1000, 9.0)
    view = view_of(requests, Unsteady(MODEL.coefficients), limits=limits)
    assert Goodput().schedule(view).num_scheduled_tokens["long"] == tokens


@pytest.mark.parametrize(
    ("rule", "tokens"), [(DeadlineRule.MEAN_TPOT, 703), (DeadlineRule.TBT, 639)]
)
def test_where_every_gap_counts_a_step_is_as_long_as_it_hardly_ever_exceeds(
    rule: DeadlineRule, tokens: int
) -> None:
    """42.5 ms are time for 749 tokens in all; a slow step of 687 ends by 44.5."""
    requests = R("decode", 11, 0.045, out=1), R("long", 1000, 9.0)
    limits = Limits(100_000, 100_000, deadline_rule=rule)
    view = view_of(requests, Unsteady(MODEL.coefficients), limits=limits)
    assert Goodput().schedule(view).num_scheduled_tokens == {"decode": 1, "long": tokens}
