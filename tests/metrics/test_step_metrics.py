"""Metrics of a replay's steps: queues, memory and the busy share."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.metrics import StepRow, summarize_steps

STEP = StepRow(
    start_s=0.0,
    duration_s=1.0,
    predicted_s=None,
    num_prefill_tokens=100,
    num_decodes=10,
    num_waiting=4,
    num_running=2,
    num_swapped=1,
    kv_used_fraction=0.5,
    num_rejected=0,
)


def test_two_steps_and_the_idleness_between_them_by_hand():
    """Two steps of 1 s with 2 s of idle time between them: means of queues are over all 4 s."""
    later = replace(
        STEP,
        start_s=3.0,
        num_prefill_tokens=0,
        num_decodes=30,
        num_waiting=0,
        num_running=6,
        kv_used_fraction=0.9,
        predicted_s=1.1,
    )
    summary = summarize_steps([STEP, later])
    assert summary.num_steps == 2
    assert summary.busy_share == pytest.approx(2 / 4)
    assert (summary.mean_waiting, summary.max_waiting) == (pytest.approx(4 / 4), 4)
    assert (summary.mean_running, summary.max_running) == (pytest.approx(8 / 4), 6)
    assert summary.max_swapped == 1
    assert summary.mean_kv_used == pytest.approx((0.5 + 0.9) / 4)
    assert summary.max_kv_used == 0.9
    assert summary.mean_batch_tokens == pytest.approx((110 + 30) / 2)
    assert summary.mean_batch_decodes == 20
    assert summary.mean_step_s == 1
    assert summary.prediction_error == pytest.approx(0.1)
    assert set(summary.as_row()) >= {"mean_waiting", "max_kv_used"}


def test_steps_that_took_no_time_have_no_means_over_it_and_none_is_an_error():
    summary = summarize_steps([replace(STEP, duration_s=0.0)])
    assert math.isnan(summary.mean_waiting)
    assert math.isnan(summary.prediction_error)
    assert summary.max_waiting == 4
    with pytest.raises(ValueError, match="no steps"):
        summarize_steps([])


@given(st.lists(st.tuples(st.floats(0.01, 2), st.floats(0, 3), st.integers(0, 99)), min_size=1))
def test_means_lie_between_nothing_and_the_most(spans):
    steps, now_s = [], 5.0
    for duration_s, idle_s, waiting in spans:
        steps.append(replace(STEP, start_s=now_s, duration_s=duration_s, num_waiting=waiting))
        now_s += duration_s + idle_s
    summary = summarize_steps(steps)
    assert 0 < summary.busy_share <= 1 + 1e-9
    assert summary.mean_waiting <= summary.max_waiting * (1 + 1e-9)
    assert summary.mean_kv_used == pytest.approx(0.5 * summary.busy_share)
