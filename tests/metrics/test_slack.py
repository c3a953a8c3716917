"""The slack of the most urgent request, by hand and against every request's slack over time."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replays import make_record, replays

from slosched.core import NO_SLO, DeadlineRule, EndReason, Request, RequestStatus
from slosched.metrics import RequestRecord, least_slack_s

MEAN = DeadlineRule.MEAN_TPOT


def least(records: list[RequestRecord], *edges_s: float, rule: DeadlineRule = MEAN) -> list[float]:
    return least_slack_s(records, rule, np.array(edges_s)).tolist()


def test_a_request_waits_gets_two_tokens_and_is_gone():
    """The first token is due at 2 s and comes at 1.5 s, so the second is due at 1.6 s."""
    record = make_record(1.5, 1.8, arrival_s=1.0)
    assert least([record], 0, 1, 1.25, 1.75, 2, 3) == pytest.approx(
        [math.inf, 0.75, -0.15, -0.2, math.inf]
    )


def test_the_most_urgent_counts_and_who_was_promised_nothing_does_not():
    patient = make_record(5.0, 50.0, slo=NO_SLO)
    assert least([patient], 0, 60) == [math.inf]
    urgent, later = make_record(0.9), make_record(0.9, arrival_s=0.5)
    assert least([urgent, patient, later], 0, 0.5, 1) == pytest.approx([0.5, 0.1])


@pytest.mark.parametrize("times", [(), (0.5,)])
def test_who_is_rejected_or_cut_off_was_waiting_until_then(times):
    gone = make_record(*times, status=RequestStatus.ABORTED, reason=EndReason.CLIENT)
    due_s = times[0] + 0.1 if times else 1.0
    for end_s in (0.75, 4.0):
        ended = RequestRecord(
            *("r", 0.0, 10, len(times), gone.slo, RequestStatus.ABORTED, EndReason.CLIENT, times),
            end_s=end_s,
        )
        assert least([ended], 0.7, 5.0) == pytest.approx([due_s - end_s])
    unfinished = make_record(*times, status=RequestStatus.WAITING, reason=None)
    assert least([unfinished], 0.7, 5.0) == pytest.approx([due_s - 5.0])


@given(replays(), st.sampled_from(DeadlineRule), st.integers(1, 30))
def test_no_request_is_ever_more_urgent(replay, rule, num_bins):
    edges_s = np.linspace(-1, 130, num_bins + 1)
    found = least_slack_s(replay, rule, edges_s)
    for i, edge_s in enumerate(edges_s[1:]):
        at_edge = [slack_s(record, rule, edge_s) for record in replay]
        assert found[i] <= min(at_edge) + 1e-9


def slack_s(record: RequestRecord, rule: DeadlineRule, now_s: float) -> float:
    """Return the slack that the scheduler would have computed just before `now_s`."""
    is_over = record.status is RequestStatus.FINISHED and now_s > record.token_times_s[-1]
    if now_s <= record.arrival_s or is_over:
        return math.inf
    request = Request("r", record.arrival_s, record.num_prompt_tokens, 100, slo=record.slo)
    request.token_times_s = [t for t in record.token_times_s if t < now_s]
    request.num_output_tokens = len(request.token_times_s)
    return rule.next_deadline_s(request) - now_s
