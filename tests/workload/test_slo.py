"""Durations and SLO rules."""

import math

import pytest

from slosched.core import SLO
from slosched.workload.slo import (
    Proportional,
    Tiers,
    TTFTPromise,
    parse_duration,
    parse_promised,
    parse_tier,
    parse_ttft,
)

TIGHT, LOOSE = SLO(0.5, 0.05), SLO(6.0, 0.1)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("1s", 1.0),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1.5 s", 1.5),
        (".25", 0.25),
        ("0.5", 0.5),
        (2, 2.0),
        ("1h", 3600.0),
        ("1e3MS", 1.0),
        ("250us", 250e-6),
    ],
)
def test_a_duration_is_a_number_and_a_unit_and_seconds_without_one(text, seconds):
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize(
    "text", ["", "s", "abc", "5 parsecs", "-1s", "0", "0ms", "nan", "inf", "1e999", "1s2"]
)
def test_what_is_no_positive_duration_is_an_error_that_names_it(text):
    with pytest.raises(ValueError, match="duration") as error:
        parse_duration(text)
    assert repr(text) in str(error.value)


def test_a_promise_that_may_be_meant_in_milliseconds_needs_its_unit():
    assert [parse_promised(text) for text in ("50ms", "50s", "0.05", "5", 50.0)] == [
        *(0.05, 50.0, 0.05, 5.0, 50.0)
    ]
    for parse in (parse_promised, parse_ttft, lambda text: parse_tier(f"1:1s/{text}")):
        with pytest.raises(ValueError, match="'50' has no unit: write 50ms or 50s"):
            parse("50")


@pytest.mark.parametrize(
    ("text", "base_s", "factor", "written"),
    [
        ("1s", 1.0, 0.0, "1s"),
        (0.5, 0.5, 0.0, "0.5s"),
        ("3x", 0.0, 3.0, "3x"),
        ("500ms + 2.5X", 0.5, 2.5, "0.5s+2.5x"),
        ("3x+0.5s", 0.5, 3.0, "0.5s+3x"),
        ("1e+1s+2x", 10.0, 2.0, "10s+2x"),
    ],
)
def test_a_ttft_is_a_time_a_multiple_of_the_prefill_or_both(text, base_s, factor, written):
    promise = parse_ttft(text)
    assert promise == TTFTPromise(base_s, factor)
    assert str(promise) == written
    assert parse_ttft(written) == promise


@pytest.mark.parametrize("text", ["", "x", "0x", "-3x", "1s+2s", "3x+3x", "3x+", "soon", "infx"])
def test_what_is_no_ttft_is_an_error_that_names_it(text):
    with pytest.raises(ValueError, match=r"duration"):
        parse_ttft(text)


def test_a_tier_is_a_weight_and_two_times():
    assert parse_tier("0.5:1s/50ms") == (0.5, SLO(1.0, 0.05), None)
    assert parse_tier("gold=0.5:1s/50ms") == (0.5, SLO(1.0, 0.05), "gold")
    for text in ("", "1:2s", "1:2s/", "x:1s/1s", "1:1s/0s"):
        with pytest.raises(ValueError, match="write weight:TTFT/TPOT") as error:
            parse_tier(text)
        assert repr(text) in str(error.value)


def test_tiers_come_in_proportion_to_their_weights_and_the_seed_decides():
    rule = Tiers((TIGHT, LOOSE), (3, 1), seed=1)
    drawn = rule.assign([10] * 4000)
    assert drawn.count(TIGHT) / 4000 == pytest.approx(0.75, abs=0.03)
    assert rule.assign([10] * 4000) == drawn
    assert Tiers((TIGHT, LOOSE), (3, 1), seed=2).assign([10] * 4000) != drawn


@pytest.mark.parametrize(
    ("slos", "weights"),
    [
        ((), ()),
        ((TIGHT,), (1, 2)),
        ((TIGHT,), (-1,)),
        ((TIGHT,), (0,)),
        ((TIGHT, LOOSE), (1, math.nan)),
    ],
)
def test_tiers_without_a_meaning_are_refused(slos, weights):
    with pytest.raises(ValueError, match="weight"):
        Tiers(slos, weights)


def test_a_proportional_ttft_is_the_base_and_a_multiple_of_the_unloaded_prefill():
    rule = Proportional(lambda n: n * 1e-4, factor=3, tpot_s=0.05, base_s=0.5, e2e_s=30)
    short, long = rule.assign([1000, 10_000])
    assert (short.ttft_s, long.ttft_s) == pytest.approx((0.8, 3.5))
    assert (long.tpot_s, long.e2e_s) == (0.05, 30)


def test_a_proportional_rule_refuses_factors_and_prefill_times_that_make_no_slo():
    with pytest.raises(ValueError, match="factor"):
        Proportional(lambda n: 1.0, factor=0, tpot_s=0.05)
    with pytest.raises(ValueError, match="base_s"):
        Proportional(lambda n: 1.0, factor=1, tpot_s=0.05, base_s=-1)
    with pytest.raises(ValueError, match=r"prefill_s\(7\) returned -1"):
        Proportional(lambda n: -1.0, factor=1, tpot_s=0.05).assign([7])
    with pytest.raises(ValueError, match="tpot_s"):
        Proportional(lambda n: 1.0, factor=1, tpot_s=-2.0).assign([7])
