"""Synthetic traces are like the real ones, reproducible, and at the requested rate."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from slosched.core import SLO
from slosched.workload.arrivals import DailyArrivals, GammaArrivals, WeibullArrivals
from slosched.workload.lengths import Fixed, Lognormal
from slosched.workload.readers import read_trace
from slosched.workload.sessions import Sessions
from slosched.workload.synthetic import FITTED_KINDS, KINDS, fitted_summary, synthesize
from tools import fit_public_traces

TRACES = Path(__file__).parents[3] / "shared" / "traces"
NUM_SEEDS = 5
# Relative tolerance of the mean over the seeds.  The dispersion over a minute is of 60 windows,
# and four gaps of several minutes determine azure_code's CV.  So both vary by a quarter.
TOLERANCE = {
    "rate": 1e-9,
    "iat_cv": 0.2,
    "idc_1s": 0.3,
    "idc_60s": 0.4,
    "prompt_mean": 0.04,
    "prompt_p50": 0.04,
    "prompt_p90": 0.04,
    "prompt_p99": 0.05,
    "output_mean": 0.05,
    "output_p50": 0.05,
    "output_p90": 0.05,
    "output_p99": 0.08,
}


def assert_alike(kind: str, reference: dict[str, str | float]) -> None:
    num_requests = min(20_000, int(reference["n"]))
    rows = [
        synthesize(kind, num_requests=num_requests, seed=seed).summary()
        for seed in range(NUM_SEEDS)
    ]
    for name, tolerance in TOLERANCE.items():
        mean = np.mean([row[name] for row in rows])
        assert mean == pytest.approx(reference[name], rel=tolerance), name


@pytest.mark.parametrize("kind", FITTED_KINDS)
def test_a_fitted_kind_has_the_statistics_of_its_trace(kind):
    assert_alike(kind, fitted_summary(kind))


@pytest.mark.parametrize("kind", FITTED_KINDS)
def test_the_embedded_statistics_are_those_of_the_file(kind):
    path = TRACES / fit_public_traces.SOURCES[kind][0]
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    trace = read_trace(path)
    assert fitted_summary(kind) == json.loads(json.dumps(trace.summary()))


def test_the_embedded_tables_are_what_the_script_makes(tmp_path):
    if not TRACES.exists():
        pytest.skip(f"{TRACES} is not on this machine")
    fit_public_traces.main(TRACES, tmp_path / "tables.json")
    embedded = fit_public_traces.TABLES
    made, kept = (json.loads(p.read_text()) for p in (tmp_path / "tables.json", embedded))
    assert made.keys() == kept.keys()
    for kind in kept:
        assert made[kind]["lengths"] == kept[kind]["lengths"]
        for name, values in kept[kind]["arrivals"].items():
            np.testing.assert_allclose(made[kind]["arrivals"][name], values, rtol=1e-6)


def test_azure_conversation_answers_are_longest_for_middling_prompts():
    """Outputs are 74 to 413 tokens by decile, a dependence that no single correlation shows."""
    trace = synthesize("azure_conv", num_requests=20_000)
    outputs = trace.output_tokens[np.argsort(trace.prompt_tokens, kind="stable")]
    by_decile = [part.mean() for part in np.array_split(outputs, 10)]
    assert min(by_decile[4:8]) > 2 * max(by_decile[1:4] + by_decile[8:])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rate", [None, 7.5])
def test_the_rate_is_exact_and_the_seed_decides(kind, rate):
    trace = synthesize(kind, num_requests=300, rate=rate, seed=4)
    natural = 1.0 if kind not in FITTED_KINDS else fitted_summary(kind)["rate"]
    assert len(trace) == 300
    assert trace.rate == pytest.approx(rate or natural)
    assert trace == synthesize(kind, num_requests=300, rate=rate, seed=4)
    other = synthesize(kind, num_requests=300, rate=rate, seed=5)
    assert trace.arrivals_s.tolist() != other.arrivals_s.tolist()
    assert trace.prompt_tokens.tolist() != other.prompt_tokens.tolist()


def test_a_duration_gives_the_requests_that_the_rate_makes_of_it():
    trace = synthesize("poisson", duration_s=120, rate=5)
    assert len(trace) == 600
    assert trace.duration_s == pytest.approx(120, abs=0.5)
    assert len(synthesize("azure_code", duration_s=0.01)) == 1


def test_gamma_gaps_have_the_cv_asked_for():
    for cv in (0.5, 1.0, 3.0):
        gaps_s = np.diff(GammaArrivals(cv).times_s(200_000, np.random.default_rng(0)))
        assert gaps_s.std() / gaps_s.mean() == pytest.approx(cv, rel=0.02)
    for kind, cv in (("gamma", 3.0), ("gamma", 0.5), ("poisson", None)):
        trace = synthesize(kind, num_requests=4_000, cv=cv)
        assert trace.summary()["iat_cv"] == pytest.approx(cv or 1, rel=0.1)


def test_weibull_gaps_have_the_cv_asked_for_and_longer_long_ones_than_gamma():
    def gaps_s(arrivals):
        return np.diff(arrivals.times_s(200_000, np.random.default_rng(0)))

    for cv in (0.5, 3.0):
        gaps = gaps_s(WeibullArrivals(cv))
        assert gaps.mean() == pytest.approx(1, rel=0.02)
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)
    longest = {
        kind: np.quantile(gaps_s(kind(3.0)), 0.9999) for kind in (WeibullArrivals, GammaArrivals)
    }
    assert longest[WeibullArrivals] > 1.3 * longest[GammaArrivals]
    assert synthesize("weibull", num_requests=3000, cv=3.0).summary()["iat_cv"] > 2
    # Gaps of CV 1 are those of a Poisson process.
    assert WeibullArrivals(1.0)._shape() == pytest.approx(1, rel=1e-6)


def test_daily_arrivals_follow_the_day_at_any_rate():
    trace = synthesize("daily", duration_s=2 * 86_400, rate=0.5)
    quarter = (trace.arrivals_s // 21_600).astype(int) % 4
    shares = np.bincount(quarter) / len(trace)
    # The mean of 1 + 0.6 sin over a quarter of the period is 1 +- 0.6 * 2 / pi.
    high, low = (1 + 1.2 / math.pi) / 4, (1 - 1.2 / math.pi) / 4
    assert shares == pytest.approx([high, high, low, low], abs=0.01)
    hour = trace.window(6 * 3600 - 1800, 3600)  # the peak, where the rate hardly changes
    assert hour.rate == pytest.approx(0.5 * 1.6, rel=0.06)
    assert hour.summary()["idc_1s"] == pytest.approx(1, abs=0.1)


def test_lengths_are_those_asked_for_and_do_not_depend_on_the_arrivals():
    lengths = {"prompt": Lognormal(1000, cv=0.5), "output": 64}
    poisson = synthesize("poisson", num_requests=20_000, **lengths)
    gamma = synthesize("gamma", num_requests=20_000, **lengths)
    assert poisson.prompt_tokens.mean() == pytest.approx(1000, rel=0.02)
    assert poisson.prompt_tokens.std() == pytest.approx(500, rel=0.05)
    assert set(poisson.output_tokens.tolist()) == {64}
    assert poisson.prompt_tokens.tolist() == gamma.prompt_tokens.tolist()


def test_every_request_has_the_slo():
    slo = SLO(1.0, 0.1)
    trace = synthesize("azure_conv", num_requests=5, slo=slo)
    assert [r.slo for r in trace.requests] == [slo] * 5


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"kind": "burst", "num_requests": 3}, "unknown kind of trace 'burst'"),
        ({"kind": "poisson"}, "either num_requests or duration_s"),
        ({"kind": "poisson", "num_requests": 3, "duration_s": 3}, "either num_requests"),
        ({"kind": "poisson", "num_requests": 0}, "num_requests must be"),
        ({"kind": "poisson", "duration_s": -1}, "duration_s must be"),
        ({"kind": "poisson", "num_requests": 3, "rate": 0}, "rate must be"),
        ({"kind": "poisson", "num_requests": 3, "rate": math.nan}, "rate must be"),
        ({"kind": "poisson", "num_requests": 3, "cv": 2}, "cv is for gamma"),
        ({"kind": "gamma", "num_requests": 3, "cv": -2}, "cv of gamma gaps must be"),
        ({"kind": "gamma", "num_requests": 3, "cv": 1e200}, "cv of gamma gaps must be"),
        ({"kind": "gamma", "num_requests": 3, "cv": 1e-200}, "cv of gamma gaps must be"),
        ({"kind": "weibull", "num_requests": 3, "cv": 0}, "cv of Weibull gaps must be"),
        ({"kind": "daily", "num_requests": 3, "cv": 1}, "cv is for gamma and weibull"),
        ({"kind": "sessions", "num_requests": 3, "prompt": 5}, "lengths of its own"),
        ({"kind": "gamma", "num_requests": 3, "sessions": Sessions()}, "sessions are for"),
        ({"kind": "poisson", "num_requests": 3, "prompt": 0}, "at least 1 token"),
        ({"kind": "azure_conv", "num_requests": 3, "output": 5}, "lengths of its own"),
    ],
)
def test_arguments_without_a_meaning_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        synthesize(**arguments)


def test_length_distributions_refuse_what_is_no_length():
    for make in (lambda: Fixed(0), lambda: Lognormal(0.5), lambda: Lognormal(10, cv=-1)):
        with pytest.raises(ValueError, match="must be"):
            make()


def test_a_day_without_a_shape_is_refused():
    for make in (lambda: DailyArrivals(swing=1.5), lambda: DailyArrivals(day_s=0)):
        with pytest.raises(ValueError, match="must be"):
            make()


def test_a_trace_is_made_without_what_takes_seconds_to_import() -> None:
    program = """
import sys
from slosched.workload import KINDS, synthesize
for kind in set(KINDS) - {"weibull"}:
    synthesize(kind, num_requests=10)
sys.exit("scipy" in sys.modules or "pandas" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
