"""What /metrics shows of the latency model."""

from __future__ import annotations

import pytest
from changeable import changing_over
from factories import make_model, make_request, make_scheduler

from slosched.core import BatchShape
from slosched.engine.server.metrics import ServerMetrics
from slosched.perfmodel import OnlineModel

POLICIES = ("fcfs", "edf")


def samples(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if line.startswith("slosched:")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_bias_margin_and_misses_of_a_model_that_learns() -> None:
    model = OnlineModel(make_model())
    decode, prefill = BatchShape(), BatchShape()
    decode.add(1, 100)
    prefill.add(100, 0)
    for _ in range(50):
        model.observe(decode, 1.2 * model.base.predict(decode))
    model.observe(prefill, 50 * model.base.predict(prefill))
    page = ServerMetrics(make_scheduler(model=model)).render("m")
    found = samples(page)

    def of(name: str, regime: str) -> float:
        return found[f'slosched:{name}{{model_name="m",regime="{regime}"}}']

    assert of("latency_model_bias", "decode") == pytest.approx(1.2, rel=0.02)
    assert of("latency_model_margin", "decode") > 1
    assert of("steps_observed_total", "decode") == 50
    assert of("steps_observed_total", "prefill") == of("steps_over_upper_total", "prefill") == 1
    assert page.count("# TYPE slosched:latency_model_bias gauge") == 1


def test_nothing_of_a_model_that_does_not_learn() -> None:
    page = ServerMetrics(make_scheduler(model=make_model())).render("m")
    assert "latency_model_bias" not in page


def test_a_portfolio_says_who_plans_and_what_it_found() -> None:
    portfolio = changing_over("fcfs", "edf")
    scheduler = make_scheduler(portfolio)
    metrics = ServerMetrics(scheduler)
    before = samples(metrics.render("m"))
    assert before['slosched:portfolio_plans{model_name="m",policy="fcfs"}'] == 1
    assert before['slosched:portfolio_evaluations_total{model_name="m"}'] == 0
    scheduler.add_request(make_request(ttft_s=1e-6))
    for i in range(10):
        portfolio.schedule(scheduler.view(i / 100))
    after = samples(metrics.render("m"))
    changes = after['slosched:portfolio_changes_total{model_name="m"}']
    assert changes == portfolio.num_changes > 0
    plans = {p: after[f'slosched:portfolio_plans{{model_name="m",policy="{p}"}}'] for p in POLICIES}
    assert plans == {p: float(p == portfolio.current) for p in POLICIES}
    shares = [after[f'slosched:portfolio_share{{model_name="m",policy="{p}"}}'] for p in POLICIES]
    assert sorted(shares) == [0, 1]


def test_nothing_of_a_portfolio_where_there_is_none() -> None:
    assert "portfolio" not in ServerMetrics(make_scheduler()).render("m")
