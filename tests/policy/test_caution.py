"""How long a step may last under the rule that counts every gap between tokens."""

from __future__ import annotations

import math

import pytest
from views import R, flat_model, view_of

from slosched.core import BatchShape, DeadlineRule, LatencyModel, Limits
from slosched.perfmodel import LinearModel, OnlineModel
from slosched.policy import Goodput
from slosched.policy.kit.caution import with_caution

MODEL = flat_model()
TBT = Limits(100_000, 100_000, deadline_rule=DeadlineRule.TBT)
DECODES, MIXED = BatchShape(), BatchShape()
DECODES.add_decodes([500] * 8)
MIXED.add_decodes([500] * 8)
MIXED.add(100, 0)


def scattering() -> LinearModel:
    """Make a model whose steps take more than 10/9 of what it says once in a hundred times."""
    return LinearModel(MODEL.coefficients, held_out_error={"under_p99": 10.0})


def test_other_rules_forgive_a_slow_step() -> None:
    view = view_of([], scattering())
    assert with_caution(view) is view


@pytest.mark.parametrize("shape", [DECODES, MIXED])
def test_a_step_is_taken_to_last_as_long_as_hardly_any_does(shape: BatchShape) -> None:
    cautious = with_caution(view_of([], scattering(), limits=TBT)).model
    assert cautious.predict(shape) == pytest.approx(MODEL.predict(shape) * (10 / 9) ** (3 / 2.33))
    assert cautious.predict_prefill(100) == MODEL.predict_prefill(100)
    exact = with_caution(view_of([], MODEL, limits=TBT)).model
    assert exact.predict(shape) == MODEL.predict(shape)


def test_a_step_that_does_more_never_seems_shorter() -> None:
    """The two kinds of steps scatter by different amounts."""
    model = OnlineModel(MODEL)
    for i in range(400):
        model.observe(DECODES, MODEL.predict(DECODES) * math.exp(0.3 * math.sin(i)))
        model.observe(MIXED, MODEL.predict(MIXED))
    cautious: LatencyModel = with_caution(view_of([], model, limits=TBT)).model
    growing_s = [cautious.predict(DECODES)]
    for num_tokens in range(1, 400, 7):
        shape = BatchShape()
        shape.add_decodes([500] * 8)
        shape.add(num_tokens + 1, 0)
        growing_s.append(cautious.predict(shape))
    assert growing_s == sorted(growing_s)


@pytest.mark.parametrize(
    ("rule", "least", "most"),
    [(DeadlineRule.MEAN_TPOT, 0.93, 0.95), (DeadlineRule.TBT, 0.97, 0.99)],
)
def test_where_steps_do_not_scatter_they_last_nearly_a_whole_tpot(
    rule: DeadlineRule, least: float, most: float
) -> None:
    tpot_s = 0.2
    steady = OnlineModel(LinearModel(MODEL.coefficients, held_out_error={"under_p99": 0.1}))
    requests = R("decode", 11, tpot_s, tpot_s=tpot_s, out=1), R("long", 9000, 9.0)
    limits = Limits(100_000, 100_000, deadline_rule=rule)
    output = Goodput().schedule(view_of(requests, steady, limits=limits))
    assert output.shape is not None
    assert least * tpot_s < MODEL.predict(output.shape) <= most * tpot_s
