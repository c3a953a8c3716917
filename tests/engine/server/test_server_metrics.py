"""What /metrics shows of the latency model."""

from __future__ import annotations

import pytest
from factories import make_model, make_scheduler

from slosched.core import BatchShape
from slosched.engine.server.metrics import ServerMetrics
from slosched.perfmodel import OnlineModel


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
