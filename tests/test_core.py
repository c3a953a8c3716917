"""The basic types of `slosched.core`: requests, SLOs, deadlines, plans."""

from __future__ import annotations

import math

import pytest
from factories import make_request
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import (
    SLO,
    BatchShape,
    DeadlineRule,
    DecodeGroup,
    ForeseesDecodes,
    Limits,
    PlansBesideDecodes,
    Request,
    SchedulerOutput,
    SchedulerView,
    foreseer,
    planner_beside,
)


@pytest.mark.parametrize("value", [0.0, -0.5, math.nan])
def test_a_promise_is_a_positive_time(value: float) -> None:
    with pytest.raises(ValueError, match="ttft_s"):
        SLO(ttft_s=value, tpot_s=0.1)
    with pytest.raises(ValueError, match="tpot_s"):
        SLO(ttft_s=0.1, tpot_s=value)
    with pytest.raises(ValueError, match="e2e_s"):
        SLO(ttft_s=0.1, tpot_s=0.1, e2e_s=value)


@pytest.mark.parametrize(
    ("rule", "expected_s"),
    [
        (DeadlineRule.ENVELOPE, 10.0 + 1.0 + 2 * 0.1),
        (DeadlineRule.MEAN_TPOT, 10.4 + 2 * 0.1),
        (DeadlineRule.TBT, 10.7 + 0.1),
    ],
)
def test_the_third_token_is_due_as_each_rule_says(rule: DeadlineRule, expected_s: float) -> None:
    request = make_request(arrival_s=10.0, ttft_s=1.0, tpot_s=0.1)
    assert rule.next_deadline_s(request) == 11.0
    request.token_times_s = [10.4, 10.7]
    request.num_output_tokens = 2
    assert rule.next_deadline_s(request) == pytest.approx(expected_s)


@pytest.mark.parametrize("rule", DeadlineRule)
def test_deadlines_that_are_set_at_once_are_those_of_each_request(rule: DeadlineRule) -> None:
    requests = [Request(f"r{i}", 0.1 * i, 5, 9, slo=SLO(1.0 + i, 0.1)) for i in range(4)]
    for i, request in enumerate(requests):
        request.token_times_s = [2.0 + 0.3 * place for place in range(i)]
        request.num_output_tokens = i
    rule.set_deadlines(requests)
    assert [r.deadline_s for r in requests] == [rule.next_deadline_s(r) for r in requests]


def test_an_early_token_banks_slack_only_in_the_envelope() -> None:
    early, late = make_request(ttft_s=1.0), make_request(ttft_s=1.0)
    for request, first_s in ((early, 0.1), (late, 0.9)):
        request.token_times_s, request.num_output_tokens = [first_s], 1
    envelope, mean = DeadlineRule.ENVELOPE, DeadlineRule.MEAN_TPOT
    assert envelope.next_deadline_s(early) == envelope.next_deadline_s(late)
    assert mean.next_deadline_s(early) < mean.next_deadline_s(late)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompt_tokens": 0}, "prompt of at least one token, not 0"),
        ({"max_tokens": 0}, "max_tokens >= 1, not 0"),
        ({"prompt_token_ids": [1, 2]}, "says 3 prompt tokens but carries 2"),
    ],
)
def test_an_impossible_request_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {"request_id": "r", "arrival_s": 0.0, "num_prompt_tokens": 3, "max_tokens": 1}
    with pytest.raises(ValueError, match=message):
        Request(**(fields | changes))


@pytest.mark.parametrize("name", ["max_num_batched_tokens", "max_num_seqs"])
def test_limits_allow_at_least_one(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: 0})


def test_a_request_is_a_decode_when_one_token_is_left_to_compute() -> None:
    request = make_request(num_prompt_tokens=5)
    assert not request.is_decode
    request.num_computed_tokens = 4
    assert request.is_decode
    request.num_computed_tokens, request.num_output_tokens = 4, 1
    assert request.num_uncomputed_tokens == 2
    assert not request.is_decode


chunks = st.lists(
    st.tuples(st.integers(min_value=1, max_value=4096), st.integers(min_value=0, max_value=8192)),
    min_size=1,
    max_size=20,
)


@given(chunks)
def test_a_shape_counts_every_query_key_pair_of_its_chunks(batch: list[tuple[int, int]]) -> None:
    shape = BatchShape()
    for new, prior in batch:
        shape.add(new, prior)
    prefills = [(new, prior) for new, prior in batch if new > 1]
    pairs = sum(sum(prior + i for i in range(1, new + 1)) for new, prior in prefills)
    assert shape.prefill_attention_tokens == pairs
    assert shape.num_prefill_tokens == sum(new for new, _ in prefills)
    assert shape.squared_chunk_tokens == sum(new**2 for new, _ in prefills)
    assert shape.prefill_context_tokens == sum(new + prior for new, prior in prefills)
    tiles = [prior + min(end, new) for new, prior in prefills for end in range(64, new + 64, 64)]
    assert shape.num_prefill_tiles == len(tiles)
    assert shape.prefill_tile_tokens == sum(tiles)
    assert shape.num_decodes == len(batch) - len(prefills)
    assert shape.decode_context_tokens == sum(prior + 1 for new, prior in batch if new == 1)
    assert shape.max_context_tokens == max(new + prior for new, prior in batch)
    decodes = [prior + 1 for new, prior in batch if new == 1]
    assert shape.max_decode_context_tokens == max(decodes, default=0)


@given(chunks, chunks)
def test_a_shape_goes_back_to_what_it_was(
    before: list[tuple[int, int]], more: list[tuple[int, int]]
) -> None:
    shape = BatchShape()
    for new, prior in before:
        shape.add(new, prior)
    shape.num_swapped_blocks = 7
    snapshot, sums = shape.copy(), shape.sums
    for new, prior in more:
        shape.add(new, prior)
    shape.num_swapped_blocks += 1
    assert shape != snapshot
    shape.restore(sums)
    assert shape == snapshot


@given(st.lists(st.integers(min_value=1, max_value=4096), min_size=1, max_size=20))
def test_decodes_added_at_once_are_decodes_added_one_by_one(contexts: list[int]) -> None:
    one_by_one, at_once = BatchShape(), BatchShape()
    for context in contexts:
        one_by_one.add(1, context - 1)
    at_once.add_decodes(contexts)
    assert at_once == one_by_one


class Plain(PlansBesideDecodes, ForeseesDecodes):
    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return SchedulerOutput()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        return SchedulerOutput()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        return math.inf


class Renamed(Plain):
    """A subclass that decides as its base does."""


class Changed(Plain):
    """A subclass whose base no longer knows what it decides."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        return SchedulerOutput(preempted=tuple(r.request_id for r in view.running))


class ChangedBoth(Changed):
    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        return None


def test_a_subclass_that_replaces_schedule_alone_is_not_asked_about_groups() -> None:
    for policy in (Plain(), Renamed()):
        assert planner_beside(policy) is policy
        assert foreseer(policy) is policy
    assert planner_beside(Changed()) is None
    assert foreseer(Changed()) is None
    both = ChangedBoth()
    assert planner_beside(both) is both
    assert foreseer(both) is None
