"""A policy that sees how long its steps take, with a latency model that does not."""

from __future__ import annotations

import pytest
from views import flat_model, view_of

from slosched.core import (
    SLO,
    BatchShape,
    DeadlineRule,
    LatencyModel,
    Limits,
    SchedulerOutput,
    SchedulerView,
)
from slosched.evaluate.capacity import Outcomes
from slosched.perfmodel import LinearModel, OnlineModel, load_model
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.drift import Drift
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import Proportional, synthesize

MODEL = flat_model()
"""5 ms + 50 us a token: 100 tokens take 10 ms."""


def step(num_prompt_tokens: int = 100) -> SchedulerOutput:
    shape = BatchShape()
    shape.add_decodes([1000])
    if num_prompt_tokens:
        shape.add(num_prompt_tokens - 1, 0)
    return SchedulerOutput(shape=shape)


def view_at(
    now_s: float, rule: DeadlineRule = DeadlineRule.MEAN_TPOT, model: LatencyModel = MODEL
) -> SchedulerView:
    return view_of([], model, now_s=now_s, limits=Limits(deadline_rule=rule))


def after(
    *steps_s: float,
    output: SchedulerOutput | None = None,
    rule: DeadlineRule = DeadlineRule.MEAN_TPOT,
    model: LatencyModel = MODEL,
) -> LatencyModel:
    """Return the model after steps, by default of 100 tokens, that took these times."""
    drift, now_s = Drift(), 0.0
    for step_s in steps_s:
        drift.note(now_s, model, output or step())
        now_s += step_s
        drift.corrected_view(view_at(now_s, rule, model), is_busy=True)
    return drift.corrected_view(view_at(now_s, rule, model), is_busy=True).model


def test_a_model_that_is_right_in_the_mean_is_left_alone() -> None:
    assert after(*[0.010] * 10) is MODEL
    assert after(*[0.009, 0.011] * 50) is MODEL


@pytest.mark.parametrize("factor", [0.7, 1.2, 1.5])
def test_a_model_that_is_off_is_corrected(factor: float) -> None:
    shape = BatchShape()
    shape.add(300, 0)
    model = after(*[0.010 * factor] * 200)
    assert model.predict(shape) == pytest.approx(0.020 * factor, rel=0.01)
    assert model.predict_prefill(300) == model.predict(shape) <= model.predict_upper(shape)


def test_a_few_steps_say_it_already() -> None:
    assert after(*[0.012] * 8).predict_prefill(100) > 0.0113


def test_the_upper_bound_has_room_for_the_noise_of_the_steps() -> None:
    steady, noisy = after(*[0.012] * 300), after(*[0.010, 0.014] * 150)
    shape = BatchShape()
    shape.add(100, 0)
    assert steady.predict_upper(shape) == pytest.approx(0.012, rel=0.02)
    assert noisy.predict_upper(shape) > 0.014


def test_where_every_gap_counts_a_model_that_is_right_in_the_mean_learns_how_steps_scatter() -> (
    None
):
    shape = BatchShape()
    shape.add(100, 0)
    steps_s = [0.009, 0.011] * 50
    learnt = after(*steps_s, rule=DeadlineRule.TBT)
    assert learnt.predict(shape) == MODEL.predict(shape)
    assert 0.011 < learnt.predict_upper(shape) < 0.014
    online = OnlineModel(MODEL)  # it learns that by itself
    assert after(*steps_s, rule=DeadlineRule.TBT, model=online) is online


class Scattered(LinearModel):
    """A model that was fitted on steps that took up to half as long again."""

    def predict_upper(self, shape: BatchShape) -> float:
        return 1.5 * self.predict(shape)


def test_where_every_gap_counts_the_scatter_of_many_steps_replaces_that_of_the_fit() -> None:
    shape = BatchShape()
    shape.add(100, 0)
    model = Scattered(MODEL.coefficients)
    for factor in (1.0, 1.2):
        steps_s = [0.010 * factor] * 100
        few = after(*steps_s[:8], rule=DeadlineRule.TBT, model=model)
        many = after(*steps_s, rule=DeadlineRule.TBT, model=model)
        assert few.predict_upper(shape) == pytest.approx(1.5 * few.predict(shape))
        assert many.predict_upper(shape) == pytest.approx(0.010 * factor, rel=0.02)


def test_noise_that_the_model_does_not_know_makes_few_gaps_late() -> None:
    """Without a look at how steps scatter 4 of 5 requests had late gaps."""
    device = load_model("h100/llama-3.1-8b")
    trace = synthesize("azure_conv", num_requests=150, seed=1).with_slo(SLO(1.0, 0.02))
    limits = Limits(deadline_rule=DeadlineRule.TBT)
    config = SimulationConfig(limits, num_blocks=20_000, disturbances=Disturbances(noise=0.08))
    requests = simulate(trace.scaled_to(20.0), Goodput(), device, config)
    assert Outcomes.of(requests, limits.deadline_rule).good.mean() > 0.85


def test_a_stall_counts_as_a_step_of_twice_the_time() -> None:
    steps_s = [0.010] * 100
    assert after(*steps_s, 60.0) is after(*steps_s, 0.020) is MODEL


def test_neither_steps_of_decodes_alone_nor_idle_times_count() -> None:
    assert after(*[0.1] * 50, output=step(0)) is MODEL
    drift = Drift()
    for i in range(50):
        drift.note(i, MODEL, step())
        assert drift.is_measuring
        assert drift.corrected_view(view_at(i + 0.9), is_busy=False).model is MODEL
        assert not drift.is_measuring


@pytest.mark.parametrize("rule", DeadlineRule)
def test_a_device_slower_by_a_quarter_costs_no_promise(rule: DeadlineRule) -> None:
    """Where every gap counts, 75 % were late when steps were planned up to the TPOT."""
    device = load_model("h100/llama-3.1-8b")
    promise = Proportional(device.predict_prefill, 2.0, 0.05, 1.0)
    trace = synthesize("azure_conv", num_requests=150, seed=1).with_slo(promise).scaled_to(30.0)
    config = SimulationConfig(Limits(deadline_rule=rule), num_blocks=20_000, bias=1.25)
    assert Outcomes.of(simulate(trace, Goodput(), device, config), rule).good.mean() > 0.95
