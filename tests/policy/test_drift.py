"""A policy that sees how long its steps take, with a latency model that does not."""

from __future__ import annotations

import pytest
from views import flat_model

from slosched.core import BatchShape, DeadlineRule, LatencyModel, Limits, SchedulerOutput
from slosched.evaluate.capacity import Outcomes
from slosched.perfmodel import load_model
from slosched.policy.goodput import Goodput
from slosched.policy.kit.drift import Drift
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


def after(*steps_s: float, output: SchedulerOutput | None = None) -> LatencyModel:
    """Return the model after steps, by default of 100 tokens, that took these times."""
    drift, now_s = Drift(), 0.0
    for step_s in steps_s:
        drift.note(now_s, MODEL, output or step())
        now_s += step_s
        drift.corrected(MODEL, now_s, is_busy=True)
    return drift.corrected(MODEL, now_s, is_busy=True)


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


def test_a_stall_counts_as_a_step_of_twice_the_time() -> None:
    steps_s = [0.010] * 100
    assert after(*steps_s, 60.0) is after(*steps_s, 0.020) is MODEL


def test_neither_steps_of_decodes_alone_nor_idle_times_count() -> None:
    assert after(*[0.1] * 50, output=step(0)) is MODEL
    drift = Drift()
    for i in range(50):
        drift.note(i, MODEL, step())
        assert drift.is_measuring
        assert drift.corrected(MODEL, i + 0.9, is_busy=False) is MODEL
        assert not drift.is_measuring


@pytest.mark.parametrize("rule", DeadlineRule)
def test_a_device_slower_by_a_quarter_costs_no_promise(rule: DeadlineRule) -> None:
    """Where every gap counts, 75 % were late when steps were planned up to the TPOT."""
    device = load_model("h100/llama-3.1-8b")
    promise = Proportional(device.predict_prefill, 2.0, 0.05, 1.0)
    trace = synthesize("azure_conv", num_requests=150, seed=1).with_slo(promise).scaled_to(30.0)
    config = SimulationConfig(Limits(deadline_rule=rule), num_blocks=20_000, bias=1.25)
    assert Outcomes.of(simulate(trace, Goodput(), device, config), rule).good.mean() > 0.95
