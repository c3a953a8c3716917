"""A device's measured speed: what was slow in a replay is found again, and simulates the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_model

from slosched.core import SLO
from slosched.engine.loop import StepRecord
from slosched.perfmodel import Measurement
from slosched.policy import FCFS
from slosched.simulator.disturbances import Disturbances
from slosched.simulator.measured_speed import (
    TimedStep,
    in_replay_time,
    mean_slowness,
    measured_speed,
)
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload import synthesize

MODEL = make_model()
TRACE = synthesize("azure_conv", num_requests=60, rate=2.0, seed=3).with_slo(SLO(1.0, 0.1))
SLOW = ((0.0, 1.0), (10.0, 1.5), (20.0, 0.8))


def recorded(disturbances: Disturbances) -> list[TimedStep]:
    steps: list[TimedStep] = []

    def note(record: StepRecord) -> None:
        chunks = tuple((c.num_new_tokens, c.num_prior_tokens) for c in record.batch.chunks)
        if chunks:
            measured = Measurement(chunks, record.result.elapsed_s)
            steps.append(TimedStep(record.end_s, measured))

    config = SimulationConfig(disturbances=disturbances, seed=5)
    simulate(TRACE, FCFS(), MODEL, config, on_step=note)
    return steps


def test_a_device_that_keeps_its_model_is_found_to_be_as_fast_as_the_model() -> None:
    found = measured_speed(recorded(Disturbances()), MODEL)
    assert [factor for _, factor in found.slowness] == pytest.approx([1.0] * len(found.slowness))
    assert found.noise == pytest.approx(0.0, abs=1e-9)


def test_slow_stretches_and_scatter_are_found_again() -> None:
    steps = recorded(Disturbances(noise=0.1, slowness=SLOW))
    found = measured_speed(steps, MODEL)
    assert found.noise == pytest.approx(0.1, rel=0.1)
    for time_s, factor in found.slowness:
        expected = next(f for from_s, f in reversed(SLOW) if time_s >= from_s)
        assert factor == pytest.approx(expected, rel=0.08)
    factors = [factor for _, factor in found.slowness]
    assert min(factors) < mean_slowness(steps, MODEL) < max(factors)


def test_a_simulation_at_the_measured_speed_takes_as_long_as_the_replay_that_was_measured() -> None:
    steps = recorded(Disturbances(slowness=SLOW))
    again = recorded(measured_speed(steps, MODEL))
    assert again[-1].ended_s == pytest.approx(steps[-1].ended_s, rel=0.01)


def test_steps_are_found_in_the_time_of_the_replay_and_warming_up_is_left_out() -> None:
    steps = recorded(Disturbances(slowness=SLOW))
    warm_up = [TimedStep(ended_s, Measurement(((64, 0),), 0.1)) for ended_s in (-0.9, -0.2)]
    on_another_clock = [replace(s, ended_s=s.ended_s + 77.0) for s in (*warm_up, *steps)]
    found = in_replay_time(on_another_clock, steps[-1].ended_s)
    assert [step.measured for step in found] == [step.measured for step in steps]
    assert [s.ended_s for s in found] == pytest.approx([s.ended_s for s in steps])


def test_without_steps_there_is_no_speed() -> None:
    with pytest.raises(ValueError, match="no step was recorded"):
        measured_speed([], MODEL)


def test_times_of_slowness_must_rise() -> None:
    with pytest.raises(ValueError, match="rising times"):
        Disturbances(slowness=((5.0, 1.0), (5.0, 2.0)))
