"""A trace is sorted and starts at 0; its operations keep what they should."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import NO_SLO, SLO
from slosched.workload.slo import Tiers
from slosched.workload.statistics import dispersion_of_counts, interarrival_cv
from slosched.workload.trace import Trace, TraceError, TraceRequest


def make_trace(*arrivals_s: float) -> Trace:
    """Make a trace: request i arrives at `arrivals_s[i]` with 10 + i and 1 + i tokens."""
    return Trace.of(
        [TraceRequest(str(i), a, 10 + i, 1 + i) for i, a in enumerate(arrivals_s)], "made"
    )


gaps = st.lists(st.floats(0.001, 100.0), min_size=3, max_size=60)


def test_of_sorts_shifts_to_zero_and_keeps_the_order_of_equal_arrivals():
    trace = make_trace(7.0, -3.0, 7.0, -1.0)
    assert [r.request_id for r in trace.requests] == ["1", "3", "0", "2"]
    assert trace.arrivals_s.tolist() == [0.0, 2.0, 10.0, 10.0]
    assert trace.duration_s == 10.0
    assert trace.rate == pytest.approx(0.3)


def test_an_empty_trace_is_an_error_that_says_so():
    with pytest.raises(TraceError, match="'nothing' is empty"):
        Trace.of([], "nothing")
    with pytest.raises(TraceError, match=r"arrives in \[50, 60\) s"):
        make_trace(0, 1).window(50, 10)


def test_requests_out_of_order_or_not_from_zero_or_named_twice_are_no_trace():
    first, second = TraceRequest("a", 0.0, 1, 1), TraceRequest("b", 1.0, 1, 1)
    with pytest.raises(TraceError, match="sorted by arrival and start at 0"):
        Trace((second,), "late")
    with pytest.raises(TraceError, match="sorted by arrival"):
        Trace((first, second, TraceRequest("c", 0.5, 1, 1)), "mixed")
    with pytest.raises(TraceError, match=r"repeats request ids: .* 2 are called 'a'; name"):
        Trace((first, first), "twins")


@pytest.mark.parametrize(
    ("values", "word"),
    [
        (("a", math.nan, 1, 1), "arrival_s"),
        (("a", math.inf, 1, 1), "arrival_s"),
        (("a", 0.0, 0, 1), "num_prompt_tokens"),
        (("a", 0.0, 1, -1), "num_output_tokens"),
        (("", 0.0, 1, 1), "request_id"),
        (("a\nb", 0.0, 1, 1), "request_id"),
    ],
)
def test_a_request_that_cannot_be_is_refused_by_field(values, word):
    with pytest.raises(TraceError, match=word):
        TraceRequest(*values)


@given(gaps, st.floats(0.01, 1000.0))
def test_scaling_changes_the_rate_and_keeps_order_lengths_and_burstiness(gaps, rate):
    trace = make_trace(*np.cumsum(gaps))
    scaled = trace.scaled_to(rate)
    assert scaled.rate == pytest.approx(rate, rel=1e-9)
    assert [r.request_id for r in scaled.requests] == [r.request_id for r in trace.requests]
    assert scaled.prompt_tokens.tolist() == trace.prompt_tokens.tolist()
    assert interarrival_cv(scaled.arrivals_s) == pytest.approx(
        interarrival_cv(trace.arrivals_s), rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_a_rate_must_be_positive_and_finite(rate):
    with pytest.raises(ValueError, match="rate must be"):
        make_trace(0, 1).scaled_to(rate)


def test_a_trace_without_a_rate_can_be_neither_scaled_nor_thinned():
    for trace in (make_trace(5.0), make_trace(5.0, 5.0)):
        with pytest.raises(TraceError, match="no rate to change"):
            trace.scaled_to(1.0)
        with pytest.raises(TraceError, match="no rate to change"):
            trace.thinned_to(1.0)
    assert math.isnan(make_trace(5.0).rate)


def bursty_trace(num_requests: int) -> Trace:
    """Make a trace with gamma gaps of CV 3 and mean 1 s."""
    gaps_s = np.random.default_rng(5).gamma(1 / 9, 9, num_requests)
    return make_trace(*np.cumsum(gaps_s))


def test_thinning_keeps_times_and_lengths_of_a_random_part():
    trace = bursty_trace(4000)
    thinned = trace.thinned_to(trace.rate / 4, seed=3)
    assert len(thinned) == 1000
    assert thinned.rate == pytest.approx(trace.rate / 4, rel=0.02)
    of = {r.request_id: r for r in trace.requests}
    shift = of[thinned.requests[0].request_id].arrival_s
    for r in thinned.requests:
        was = of[r.request_id]
        assert r.arrival_s == was.arrival_s - shift
        assert (r.num_prompt_tokens, r.num_output_tokens) == (
            was.num_prompt_tokens,
            was.num_output_tokens,
        )
    assert thinned.provenance["thinning_seed"] == 3
    # Independent thinning with probability p turns the index of dispersion D into 1 + p (D - 1).
    whole = dispersion_of_counts(trace.arrivals_s, 20.0)
    assert dispersion_of_counts(thinned.arrivals_s, 20.0) == pytest.approx(
        1 + (whole - 1) / 4, rel=0.3
    )


def test_thinning_is_seeded_and_a_lower_rate_keeps_a_part_of_a_higher_one():
    trace = bursty_trace(500)
    kept = [
        {r.request_id for r in trace.thinned_to(trace.rate * share, seed).requests}
        for share, seed in ((0.2, 0), (0.5, 0), (0.5, 1))
    ]
    assert kept[0] < kept[1]
    assert kept[1] != kept[2]
    assert trace.thinned_to(trace.rate).requests == trace.requests


def test_what_cannot_be_thinned_is_refused():
    for rate in (0, -1.0, math.nan, math.inf, 1.01):
        with pytest.raises(ValueError, match="thinned to a rate in"):
            make_trace(0, 1, 2).thinned_to(rate)


def test_the_poisson_control_keeps_requests_and_rate_and_loses_the_bursts():
    trace = bursty_trace(4000)
    control = trace.with_poisson_arrivals(seed=2)
    assert interarrival_cv(trace.arrivals_s) > 2.5
    assert interarrival_cv(control.arrivals_s) == pytest.approx(1, abs=0.05)
    assert dispersion_of_counts(control.arrivals_s, 20.0) == pytest.approx(1, abs=0.3)
    assert control.rate == pytest.approx(trace.rate, rel=1e-12)
    assert [r.request_id for r in control.requests] == [r.request_id for r in trace.requests]
    assert control.output_tokens.tolist() == trace.output_tokens.tolist()
    assert control == trace.with_poisson_arrivals(seed=2)
    assert control.requests != trace.with_poisson_arrivals(seed=3).requests


@pytest.mark.parametrize("num_requests", [1, 2, 3])
def test_the_poisson_control_of_few_requests_at_a_rate_given(num_requests):
    control = make_trace(*[0.0] * num_requests).with_poisson_arrivals(rate=4.0)
    assert control.duration_s == (num_requests - 1) / 4
    with pytest.raises(TraceError, match="no rate to change: it needs two arrivals"):
        make_trace(*[0.0] * num_requests).with_poisson_arrivals()


def test_head_and_window_cut_and_start_again_at_zero():
    trace = make_trace(0, 1, 2, 3, 4)
    assert [r.request_id for r in trace.head(2).requests] == ["0", "1"]
    assert len(trace.head(100)) == 5
    window = trace.window(1.0, 2.0)
    assert [(r.request_id, r.arrival_s) for r in window.requests] == [("1", 0.0), ("2", 1.0)]
    assert window.provenance["window_start_s"] == 1.0
    with pytest.raises(ValueError, match="n >= 1"):
        trace.head(0)
    with pytest.raises(ValueError, match="positive duration"):
        trace.window(0, 0)


def test_clipping_shortens_and_counts():
    trace = make_trace(0, 1, 2, 3)  # prompts 10..13, outputs 1..4
    clipped = trace.clipped(max_prompt_tokens=11, max_output_tokens=3)
    assert (clipped.num_prompts, clipped.num_outputs) == (2, 1)
    assert clipped.trace.prompt_tokens.tolist() == [10, 11, 11, 11]
    assert clipped.trace.output_tokens.tolist() == [1, 2, 3, 3]
    assert clipped.trace.provenance["clipped_prompts"] == 2
    assert trace.clipped().trace.requests == trace.requests
    with pytest.raises(ValueError, match="max_output_tokens"):
        trace.clipped(max_output_tokens=0)


def test_with_slo_takes_one_promise_or_a_rule():
    trace = make_trace(0, 1, 2)
    slo = SLO(1.0, 0.1)
    assert {r.slo for r in trace.requests} == {NO_SLO}
    assert [r.slo for r in trace.with_slo(slo).requests] == [slo] * 3
    assert [r.slo for r in trace.with_slo(Tiers((slo,), (1,))).requests] == [slo] * 3


def test_summary_by_hand():
    trace = make_trace(0, 1, 2, 5)
    row = trace.summary()
    assert row["trace"] == "made"
    assert row["n"] == 4
    assert row["span_s"] == 5
    assert row["rate"] == pytest.approx(0.6)
    # Gaps 1, 1, 3: mean 5/3, variance 8/9.
    assert row["iat_cv"] == pytest.approx(math.sqrt(8 / 9) / (5 / 3))
    # Whole windows of 1 s: [0,1) [1,2) [2,3) [3,4) [4,5) hold 1 1 1 0 0; mean 0.6, variance 0.24.
    assert row["idc_1s"] == pytest.approx(0.24 / 0.6)
    assert math.isnan(row["idc_60s"])
    assert row["prompt_mean"] == 11.5
    assert row["output_p50"] == 2.5


def test_dispersion_is_one_for_poisson_and_zero_for_clockwork():
    rng = np.random.default_rng(0)
    assert dispersion_of_counts(np.cumsum(rng.exponential(0.2, 50_000)), 1.0) == pytest.approx(
        1, abs=0.05
    )
    assert dispersion_of_counts(np.arange(0, 1000, 0.25), 1.0) == 0


def test_statistics_of_a_span_that_is_far_too_long():
    """Such spans occur where milliseconds were written for seconds, or at a tiny rate."""
    for last_s in (1.7e12, 1e300):
        arrivals_s = np.array([0.0, 0.5, 2.0, last_s])
        assert dispersion_of_counts(arrivals_s, 1.0) == pytest.approx(5 / 3)
        assert interarrival_cv(arrivals_s) == pytest.approx(math.sqrt(2))


@pytest.mark.parametrize("factor", [0.0, -1.0, 1e308, math.inf, math.nan])
def test_lengths_are_scaled_by_a_factor_that_leaves_them_lengths(factor):
    trace = Trace.of([TraceRequest("a", 0.0, 200, 20)], "one")
    with pytest.raises(ValueError, match="lengths can be scaled by a positive factor of at most"):
        trace.with_lengths_scaled(factor)
