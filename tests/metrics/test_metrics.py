"""Metrics against numbers worked out by hand, and laws that they obey."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replays import SLO_1S_100MS, make_record, records, rejected, replays

from slosched.core import NO_SLO, SLO, TOLERANCE_S, DeadlineRule, EndReason, Request, RequestStatus
from slosched.metrics import (
    Percentiles,
    RequestColumns,
    RequestRecord,
    attainment_by_decile,
    good_requests,
    is_good,
    met_tokens,
    met_ttft,
    offered_window_s,
    percentiles,
    summarize,
)

MEAN, ENVELOPE, TBT = DeadlineRule.MEAN_TPOT, DeadlineRule.ENVELOPE, DeadlineRule.TBT


def test_times_of_one_request_by_hand():
    record = make_record(2.5, 2.6, 3.0, 3.1, arrival_s=2.0)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.tpot_s == pytest.approx(0.2)
    assert record.itl_s == pytest.approx((0.1, 0.4, 0.1))
    assert record.e2e_s == pytest.approx(1.1)


def test_a_single_token_has_tpot_zero_and_no_gaps():
    record = make_record(0.5)
    assert record.tpot_s == 0
    assert record.itl_s == ()
    assert all(is_good(record, rule) for rule in DeadlineRule)


def test_without_a_token_there_are_no_times():
    record = rejected(1.0, EndReason.EXPIRED)
    assert record.ttft_s is record.tpot_s is record.e2e_s is None
    assert not met_ttft(record)
    assert not any(met_tokens(record, rule) for rule in DeadlineRule)


def test_a_record_copies_the_request_as_it_was():
    request = Request("a", 1.0, 5, 8, slo=SLO_1S_100MS)
    request.token_times_s, request.num_output_tokens = [1.5, 1.6], 2
    request.status, request.end_reason, request.end_s = (
        RequestStatus.FINISHED,
        EndReason.LENGTH,
        1.6,
    )
    request.num_preemptions, request.num_swaps = 1, 2
    record = RequestRecord.from_request(request)
    request.token_times_s.append(9.0)
    assert record == RequestRecord(
        *("a", 1.0, 5, 2, SLO_1S_100MS, RequestStatus.FINISHED, EndReason.LENGTH, (1.5, 1.6)),
        *(1.6, 1, 2),
    )


def test_a_record_whose_tokens_lack_times_is_refused():
    with pytest.raises(ValueError, match="3 output tokens but 1 token times"):
        RequestRecord("a", 0, 1, 3, NO_SLO, RequestStatus.RUNNING, token_times_s=(1.0,))


@pytest.mark.parametrize(
    ("times", "mean", "envelope", "tbt"),
    [
        # TTFT is 1 s and TPOT 0.1 s, so the envelope is 1.0, 1.1, 1.2, 1.3.
        ((1.0, 1.1, 1.2, 1.3), True, True, True),
        # The first token is early, then a stall of 0.6 s: only the envelope has banked that time.
        ((0.2, 0.3, 0.9, 1.0), False, True, False),
        # The last gap is long after short ones: the mean and the envelope allow it, tbt does not.
        ((1.0, 1.02, 1.04, 1.3), True, True, False),
        # Late in the middle and early at the end: only the mean allows it.
        ((1.0, 1.25, 1.26, 1.27), True, False, False),
        # The first token is late and the others regular: TTFT is missed, but no gap is late.
        ((1.5, 1.6, 1.7, 1.8), True, False, True),
    ],
)
def test_the_three_rules_by_hand(times, mean, envelope, tbt):
    record = make_record(*times)
    assert met_tokens(record, MEAN) is mean
    assert met_tokens(record, ENVELOPE) is envelope
    assert met_tokens(record, TBT) is tbt
    assert is_good(record, MEAN) is (mean and times[0] <= 1.0)


@pytest.mark.parametrize(("num_late", "kept"), [(0, True), (1, True), (2, False)])
def test_tbt_forgives_one_gap_in_a_hundred(num_late, kept):
    gaps = [0.2] * num_late + [0.05] * (100 - num_late)
    times = [0.5]
    for gap in gaps:
        times.append(times[-1] + gap)
    assert met_tokens(make_record(*times), TBT) is kept


def test_a_token_exactly_on_its_deadline_is_on_time_whatever_the_rounding():
    """In binary 0.1 + 0.2 is not 0.3; each of 30 tokens comes a rounded 0.1 s after the last."""
    times = [1.0]
    for _ in range(30):
        times.append(times[-1] + 0.1)
    record = make_record(*(t + 1000.3 for t in times), arrival_s=1000.3)
    assert all(is_good(record, rule) for rule in DeadlineRule)
    late = make_record(1.00001, 1.1)
    assert not met_ttft(late)


def test_an_unbreakable_promise_is_kept_by_any_request_that_finishes():
    record = make_record(5.0, 50.0, 500.0, slo=NO_SLO)
    assert all(is_good(record, rule) for rule in DeadlineRule)


def test_end_to_end_counts_only_if_it_was_promised():
    times = (0.5, 0.55, 0.6)
    assert is_good(make_record(*times, slo=SLO(1, 0.1, e2e_s=0.6)), MEAN)
    assert not is_good(make_record(*times, slo=SLO(1, 0.1, e2e_s=0.59)), MEAN)


@pytest.mark.parametrize("status", [s for s in RequestStatus if s is not RequestStatus.FINISHED])
def test_what_has_not_finished_is_not_good_however_fast(status):
    assert not is_good(make_record(0.1, 0.15, status=status), MEAN)


def test_percentiles_interpolate_and_of_nothing_are_nan():
    assert percentiles([3.0, 1.0, 2.0]) == Percentiles(2.0, pytest.approx(2.8), pytest.approx(2.98))
    assert all(math.isnan(p) for p in (percentiles([]).p50, percentiles([]).p99))


REPLAY = [
    make_record(0.5, 0.6, 0.7, arrival_s=0.0, prompt=1),  # good, 3 tokens
    make_record(3.0, 3.1, arrival_s=1.0, prompt=2),  # TTFT of 2 s is late
    make_record(2.5, 2.9, arrival_s=2.0, prompt=3),  # TPOT of 0.4 s is late
    rejected(3.0, EndReason.EXPIRED, prompt=4),
    rejected(4.0, EndReason.CASCADE, prompt=5),
    rejected(5.0, EndReason.EXPIRED, prompt=6),
    make_record(6.5, arrival_s=6.0, prompt=7, status=RequestStatus.RUNNING, reason=None),
    make_record(arrival_s=7.0, prompt=8, status=RequestStatus.ABORTED, reason=EndReason.CLIENT),
    make_record(8.5, 8.6, arrival_s=8.0, prompt=9),  # good, 2 tokens
]


def test_a_summary_by_hand():
    summary = summarize(REPLAY, MEAN)
    assert (summary.num_offered, summary.num_finished, summary.num_rejected) == (9, 4, 3)
    assert (summary.num_aborted, summary.num_unfinished, summary.num_good) == (1, 1, 2)
    assert summary.attainment == pytest.approx(2 / 9)
    assert summary.attainment_admitted == pytest.approx(2 / 6)
    assert summary.ttft_attainment == pytest.approx(4 / 9)  # the running one kept its TTFT
    assert summary.token_attainment == pytest.approx(3 / 9)  # all finished ones but the third
    # Nine requests came, one a second, so the load was offered for nine mean gaps, 9 s.
    assert offered_window_s(REPLAY) == pytest.approx(9.0)
    assert summary.offered_requests_per_s == pytest.approx(1.0)
    assert summary.good_requests_per_s == pytest.approx(2 / 9)
    assert summary.good_tokens_per_s == pytest.approx(5 / 9)
    assert summary.output_tokens_per_s == pytest.approx(10 / 8.6)
    assert summary.rejected_by_reason == {EndReason.EXPIRED: 2, EndReason.CASCADE: 1}
    # TTFTs 0.5, 2.0, 0.5, 0.5, 0.5; gaps 0.1 (four times) and 0.4; E2Es 0.7, 2.1, 0.9, 0.6.
    assert summary.ttft_s.p50 == pytest.approx(0.5)
    assert summary.ttft_s.p90 == pytest.approx(0.5 + 0.6 * 1.5)
    assert summary.itl_s.p90 == pytest.approx(0.1 + 0.6 * 0.3)
    assert summary.e2e_s.p50 == pytest.approx(0.8)


def test_a_row_is_flat():
    row = summarize(REPLAY, MEAN).as_row()
    assert row["deadline_rule"] == "mean_tpot"
    assert row["rejected_expired"] == 2
    assert row["ttft_p50_s"] == pytest.approx(0.5)
    assert all(isinstance(value, str | int | float) for value in row.values())


def test_nothing_to_summarize_is_an_error_and_one_request_has_no_rate():
    with pytest.raises(ValueError, match="no records"):
        summarize([], MEAN)
    alone = summarize([make_record(0.5)], MEAN)
    assert alone.attainment == 1
    assert math.isnan(alone.good_requests_per_s)


def test_all_rejected_has_attainment_zero_and_none_on_admitted():
    summary = summarize([rejected(0, EndReason.EXPIRED), rejected(1, EndReason.EXPIRED)], MEAN)
    assert summary.attainment == summary.good_requests_per_s == 0
    assert math.isnan(summary.attainment_admitted)
    assert math.isnan(summary.ttft_s.p50)


def test_deciles_are_by_prompt_length_and_count_who_pays():
    records = [make_record(0.5, prompt=p) for p in range(1, 10)]
    records += [make_record(5.0, prompt=p) for p in range(10, 20)]
    records += [rejected(0, EndReason.EXPIRED, prompt=20)]
    rows = attainment_by_decile(records, MEAN)
    assert [(r.min_prompt_tokens, r.max_prompt_tokens) for r in rows] == [
        (i, i + 1) for i in range(1, 20, 2)
    ]
    assert [row.attainment for row in rows] == [1, 1, 1, 1, 0.5, 0, 0, 0, 0, 0]
    assert [row.num_rejected for row in rows] == [0] * 9 + [1]


def test_equal_prompts_stay_in_one_decile():
    rows = attainment_by_decile([make_record(0.5, prompt=7)] * 25, MEAN)
    assert [(row.num_offered, row.attainment) for row in rows] == [(25, 1.0)]
    assert attainment_by_decile([], MEAN) == []


rules = st.sampled_from(DeadlineRule)


@given(replays(), rules)
def test_good_is_at_most_offered_and_every_request_is_counted_once(replay, rule):
    summary = summarize(replay, rule)
    ends = (summary.num_finished, summary.num_rejected, summary.num_aborted)
    assert sum(ends) + summary.num_unfinished == summary.num_offered == len(replay)
    assert summary.num_good <= summary.num_finished
    assert summary.attainment <= min(summary.ttft_attainment, summary.token_attainment)
    if not math.isnan(summary.good_requests_per_s):
        assert summary.good_requests_per_s <= summary.offered_requests_per_s
    if not math.isnan(summary.attainment_admitted):
        assert summary.attainment <= summary.attainment_admitted <= 1
    deciles = attainment_by_decile(replay, rule)
    assert sum(row.num_offered for row in deciles) == len(replay)
    assert sum(row.num_good for row in deciles) == summary.num_good


@given(records(), rules, st.floats(1, 5), st.floats(1, 5))
def test_a_looser_promise_is_never_harder_to_keep(record, rule, ttft_factor, tpot_factor):
    looser = SLO(record.slo.ttft_s * ttft_factor, record.slo.tpot_s * tpot_factor)
    eased = make_record(
        *record.token_times_s, arrival_s=record.arrival_s, slo=looser, status=record.status
    )
    assert is_good(eased, rule) >= is_good(record, rule)


@given(replays(), rules)
def test_a_replay_is_judged_like_its_requests_one_by_one_and_by_the_definitions(replay, rule):
    columns = RequestColumns.of(replay)
    assert good_requests(columns, rule).tolist() == [is_good(r, rule) for r in replay]
    for record in replay:
        assert met_ttft(record) is (bool(record.token_times_s) and first_is_on_time(record))
        assert met_tokens(record, rule) is (
            bool(record.token_times_s) and tokens_are_kept(record, rule)
        )


def first_is_on_time(record: RequestRecord) -> bool:
    return record.ttft_s <= record.slo.ttft_s + TOLERANCE_S


def tokens_are_kept(record: RequestRecord, rule: DeadlineRule) -> bool:
    tpot_s = record.slo.tpot_s + TOLERANCE_S
    if rule is MEAN:
        return record.tpot_s <= tpot_s
    if rule is TBT:
        return sum(gap > tpot_s for gap in record.itl_s) <= 0.01 * len(record.itl_s)
    first_due_s = record.arrival_s + record.slo.ttft_s
    due_s = (first_due_s + j * record.slo.tpot_s for j in range(record.num_output_tokens))
    return all(t <= due + TOLERANCE_S for t, due in zip(record.token_times_s, due_s, strict=True))


@given(records())
def test_regular_or_on_time_tokens_imply_each_other(record):
    """Without late gaps the mean is kept, and with TTFT also the envelope."""
    if all(gap <= record.slo.tpot_s for gap in record.itl_s):
        assert met_tokens(record, TBT)
        assert met_tokens(record, MEAN)
        if record.ttft_s <= record.slo.ttft_s:
            assert met_tokens(record, ENVELOPE)


@given(replays(), rules, st.floats(-1000, 1000))
def test_shifting_all_times_changes_no_score(replay, rule, shift_s):
    shifted = [
        make_record(
            *(t + shift_s for t in r.token_times_s),
            arrival_s=r.arrival_s + shift_s,
            # Half a microsecond of room, so that rounding cannot decide whether the SLO is kept.
            slo=SLO(round(r.slo.ttft_s, 3) + 5e-7, round(r.slo.tpot_s, 3) + 5e-7),
            status=r.status,
        )
        for r in replay
    ]
    plain = [
        make_record(
            *r.token_times_s,
            arrival_s=r.arrival_s,
            slo=SLO(round(r.slo.ttft_s, 3) + 5e-7, round(r.slo.tpot_s, 3) + 5e-7),
            status=r.status,
        )
        for r in replay
    ]
    before, after = summarize(plain, rule), summarize(shifted, rule)
    assert before.num_good == after.num_good
