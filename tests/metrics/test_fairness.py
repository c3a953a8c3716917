"""Attainment by tier and by tenth of the prompt lengths, and Jain's index over the tenths."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replays import make_record, rejected, replays

from slosched.core import SLO, DeadlineRule, EndReason
from slosched.metrics import (
    attainment_by_decile,
    attainment_by_tier,
    is_good,
    jain_index,
    summarize,
)

RULE = DeadlineRule.MEAN_TPOT
CHAT, BATCH = SLO(0.5, 0.05), SLO(6.0, 0.1)


def test_tiers_are_by_promise_the_tightest_first():
    replay = [
        make_record(5.0, slo=BATCH),
        make_record(0.4, slo=CHAT),
        make_record(0.9, slo=CHAT),
        make_record(0.4, slo=SLO(0.5, 0.05, e2e_s=9.0)),
        rejected(0.0, EndReason.EXPIRED),
    ]
    rows = attainment_by_tier(replay, RULE)
    assert [(r.slo, r.num_offered, r.num_good, r.num_rejected) for r in rows] == [
        (SLO(0.5, 0.05, e2e_s=9.0), 1, 1, 0),
        (CHAT, 2, 1, 0),
        (SLO(1.0, 0.1), 1, 0, 1),
        (BATCH, 1, 1, 0),
    ]
    assert [row.attainment for row in rows] == [1.0, 0.5, 0.0, 1.0]
    assert attainment_by_tier([], RULE) == []


@pytest.mark.parametrize(
    ("shares", "index"),
    [([0.5] * 10, 1.0), ([1.0] + [0.0] * 9, 0.1), ([1.0, 0.5], 1.5**2 / (2 * 1.25))],
)
def test_jains_index_by_hand(shares, index):
    assert jain_index(shares) == pytest.approx(index)


def test_jains_index_of_nothing_good_is_not_known():
    assert math.isnan(jain_index([0.0, 0.0]))


@given(st.lists(st.floats(1e-3, 1), min_size=1, max_size=10), st.floats(0.1, 1))
def test_jains_index_lies_between_one_nth_and_one_and_knows_no_scale(shares, factor):
    index = jain_index(shares)
    assert 1 / len(shares) - 1e-12 <= index <= 1 + 1e-12
    assert jain_index([share * factor for share in shares]) == pytest.approx(index)


def test_a_summary_tells_who_pays():
    """The four longest of twenty prompts are late: two tenths attain 0, the others 1."""
    replay = [make_record(0.5 if n <= 16 else 5.0, prompt=n) for n in range(1, 21)]
    summary = summarize(replay, RULE)
    assert summary.worst_decile_attainment == 0.0
    assert summary.jain_index == pytest.approx(8**2 / (10 * 8))


@given(replays(), st.sampled_from(DeadlineRule))
def test_every_request_is_in_one_tier_and_in_one_tenth(replay, rule):
    tiers, deciles = attainment_by_tier(replay, rule), attainment_by_decile(replay, rule)
    num_good = sum(is_good(record, rule) for record in replay)
    num_rejected = sum(record.status == "rejected" for record in replay)
    for rows in (tiers, deciles):
        assert sum(row.num_offered for row in rows) == len(replay)
        assert sum(row.num_good for row in rows) == num_good
        assert sum(row.num_rejected for row in rows) == num_rejected
        assert all(row.num_offered > 0 for row in rows)
    assert min(row.attainment for row in deciles) == summarize(replay, rule).worst_decile_attainment
