"""Deadlines of single tokens, late gaps and fluidity, by hand and against their definitions."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replays import make_record, records, rejected, replays

from slosched.core import NO_SLO, SLO, TOLERANCE_S, DeadlineRule, EndReason, Request
from slosched.metrics import (
    RequestColumns,
    RequestRecord,
    fluid_token_rate,
    fluidity_indices,
    is_good,
    late_gaps,
    summarize,
    token_due_s,
    tokens_on_time,
)

MEAN, ENVELOPE, TBT = DeadlineRule.MEAN_TPOT, DeadlineRule.ENVELOPE, DeadlineRule.TBT
STALLED = make_record(0.5, 0.6, 1.4, 1.45, 1.5)
"""The first token is 0.5 s early, then a gap lasts 0.8 s; the SLO is 1 s and 0.1 s a token."""


def fluidity(record: RequestRecord) -> float:
    return float(fluidity_indices(RequestColumns.of([record]))[0])


@pytest.mark.parametrize(
    ("rule", "due_s", "on_time"),
    [
        (ENVELOPE, [1.0, 1.1, 1.2, 1.3, 1.4], [True, True, False, False, False]),
        (MEAN, [1.0, 0.6, 0.7, 0.8, 0.9], [True, True, False, False, False]),
        (TBT, [1.0, 0.6, 0.7, 1.5, 1.55], [True, True, False, True, True]),
    ],
)
def test_when_tokens_are_due_by_hand(rule, due_s, on_time):
    columns = RequestColumns.of([rejected(0, EndReason.EXPIRED), STALLED])
    assert token_due_s(columns, rule).tolist() == pytest.approx(due_s)
    assert tokens_on_time(columns, rule).tolist() == on_time
    summary = summarize([STALLED, rejected(1, EndReason.EXPIRED)], rule)
    assert summary.on_time_tokens[rule] == pytest.approx(sum(on_time) / 5)
    # Two requests 1 s apart were offered in two mean gaps, 2 s.
    assert summary.on_time_tokens_per_s == pytest.approx(sum(on_time) / 2)


@given(records(), st.sampled_from(DeadlineRule))
def test_tokens_are_due_when_the_scheduler_was_told_that_they_are(record, rule):
    """Metrics and policies compute the same deadlines."""
    request = Request("r", record.arrival_s, record.num_prompt_tokens, 100, slo=record.slo)
    due_s = []
    for time_s in record.token_times_s:
        due_s.append(rule.next_deadline_s(request))
        request.token_times_s.append(time_s)
        request.num_output_tokens += 1
    assert token_due_s(RequestColumns.of([record]), rule).tolist() == pytest.approx(due_s)


def test_no_token_is_late_for_an_unbreakable_promise():
    columns = RequestColumns.of([make_record(5.0, 50.0, 500.0, slo=NO_SLO)])
    for rule in DeadlineRule:
        assert tokens_on_time(columns, rule).all()
    assert not late_gaps(columns).any()
    assert fluidity_indices(columns).tolist() == [1.0]


def test_only_the_first_token_may_be_late_where_only_it_has_a_deadline():
    columns = RequestColumns.of([make_record(5.0, 50.0, 500.0, slo=SLO(1.0, math.inf))])
    for rule in DeadlineRule:
        assert tokens_on_time(columns, rule).tolist() == [False, True, True]


def test_late_gaps_are_those_longer_than_tpot_in_whatever_order():
    summary = summarize([STALLED, make_record(9.0, 9.2), make_record(0.1)], TBT)
    assert summary.late_gap_share == pytest.approx(2 / 5)
    alone = summarize([make_record(0.1)], TBT)
    assert math.isnan(alone.late_gap_share)


@pytest.mark.parametrize(
    ("times", "index"),
    [
        ((1.0, 1.1, 1.2, 1.3), 1.0),
        # The first token banks 0.5 s, the second adds nothing, and the gap of 0.8 s needs 0.7 s.
        # So it is a miss, after which gaps of 0.05 s bank slack again: one miss in five tokens.
        ((0.5, 0.6, 1.4, 1.45, 1.5), 0.8),
        # The same gap is no miss where enough slack is banked.
        ((0.2, 0.3, 1.1, 1.15), 1.0),
        # TTFT is missed and the reader starts anew from there; the later tokens are regular.
        ((3.0, 3.1, 3.2, 3.3), 0.75),
        # Every gap is too long, so all tokens but the first are misses.
        ((1.0, 1.2, 1.4, 1.6, 1.8), 0.2),
    ],
)
def test_fluidity_by_hand(times, index):
    assert fluidity(make_record(*times)) == pytest.approx(index)


def etalon(record: RequestRecord) -> float:
    """Compute Etalon's fluidity index by carrying the slack from token to token."""
    slack_s, hits, last_s = 0.0, 0, record.arrival_s
    for j, time_s in enumerate(record.token_times_s):
        allowed_s = slack_s + (record.slo.tpot_s if j else record.slo.ttft_s)
        gap_s = time_s - last_s
        is_hit = gap_s <= allowed_s + TOLERANCE_S
        slack_s = max(0.0, allowed_s - gap_s) if is_hit else 0.0
        hits, last_s = hits + is_hit, time_s
    return hits / record.num_output_tokens


def on_a_grid(record: RequestRecord) -> RequestRecord:
    """Round times and SLOs to sixty-fourths of a second, so that sums of them are exact."""
    return make_record(
        *(round(t * 64) / 64 for t in record.token_times_s),
        arrival_s=round(record.arrival_s * 64) / 64,
        slo=SLO(math.ceil(record.slo.ttft_s * 64) / 64, math.ceil(record.slo.tpot_s * 64) / 64),
    )


@given(st.lists(records().map(on_a_grid), min_size=1, max_size=5))
def test_fluidity_is_what_carrying_the_slack_gives(replay):
    indices = fluidity_indices(RequestColumns.of(replay))
    assert indices.tolist() == [etalon(record) for record in replay]


@given(replays())
def test_laws_of_token_metrics(replay):
    columns = RequestColumns.of(replay)
    indices = fluidity_indices(columns)
    for record, index in zip(replay, indices, strict=True):
        assert math.isnan(index) == (record.num_output_tokens == 0)
        if is_good(record, ENVELOPE):
            assert index == 1.0  # a request that keeps the envelope has no miss
    # A token that is late for the envelope may still be a hit, after the reader started anew.
    on_time = columns.count(tokens_on_time(columns, ENVELOPE))
    begun = columns.has_begun
    assert (indices[begun] >= on_time[begun] / columns.num_output_tokens[begun] - 1e-12).all()
    summary = summarize(replay, ENVELOPE)
    assert summary.good_tokens_per_s <= summary.on_time_tokens_per_s or math.isnan(
        summary.good_tokens_per_s
    )


def test_the_fluid_token_rate_is_the_pace_that_all_but_a_few_can_follow():
    """All requests emit ten tokens a second, so no reader of a faster pace is served fluidly."""
    regular = [make_record(*(0.5 + 0.1 * j for j in range(200)), slo=SLO(0.5, 1.0))] * 100
    # At a faster pace every token is late, so the rate is exact although 0.9 would suffice.
    assert fluid_token_rate(regular) == pytest.approx(10.0, rel=2e-3)
    spoilt = [*regular, rejected(0, EndReason.EXPIRED), rejected(0, EndReason.EXPIRED)]
    assert fluid_token_rate(spoilt) == 0.0  # only 98 % of them got a token
    assert fluid_token_rate(spoilt, share=0.98) == pytest.approx(10.0, rel=2e-3)
    assert math.isinf(fluid_token_rate([make_record(0.1)]))
