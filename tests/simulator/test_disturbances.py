"""Disturbances of the simulated device: their sizes and rates, and that seeds repeat them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from factories import make_model
from hypothesis import given, settings
from hypothesis import strategies as st

from slosched.core import SLO
from slosched.engine.loop import StepRecord
from slosched.policy import FCFS
from slosched.simulator.disturbances import (
    DRIFT_PERIOD_S,
    SLOW_FACTOR,
    Disturbances,
    DisturbedTimes,
)
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace, TraceRequest

STEP_S = 0.015625


def factors(disturbances: Disturbances, num_steps: int, seed: int = 7) -> np.ndarray:
    """Return the true times of successive steps, over what the model says."""
    times, now_s, found = DisturbedTimes(disturbances, seed), 0.0, []
    for _ in range(num_steps):
        seconds = times.seconds(STEP_S, now_s)
        found.append(seconds / STEP_S)
        now_s += seconds
    return np.array(found)


def test_noise_has_mean_one_and_the_sigma_that_was_asked_for() -> None:
    found = factors(Disturbances(noise=0.3), 20_000)
    assert found.mean() == pytest.approx(1.0, abs=0.01)
    assert np.log(found).std() == pytest.approx(0.3, abs=0.01)


def test_a_drifting_device_is_slower_and_faster_by_that_share_and_itself_on_average() -> None:
    found = factors(Disturbances(drift=0.2), round(DRIFT_PERIOD_S / STEP_S))
    assert found[0] == 1
    assert found.max() == pytest.approx(1.2, abs=1e-3)
    assert found.min() == pytest.approx(0.8, abs=1e-3)
    assert np.average(found, weights=found) == pytest.approx(1, abs=1e-3)


def test_slow_steps_are_as_many_as_asked_for_and_follow_paretos_law() -> None:
    tail, num_steps = 0.05, 200_000
    found = factors(Disturbances(tail=tail), num_steps)
    usual = found.min()
    slow = found[found > usual] / usual
    assert len(slow) == pytest.approx(tail * num_steps, rel=0.05)
    assert slow.min() >= SLOW_FACTOR * (1 - 1e-12)
    for times, share in ((2.0, 0.25), (5.0, 0.04), (10.0, 0.01)):
        assert (slow > times * SLOW_FACTOR).mean() == pytest.approx(share, rel=0.25)
    assert found.mean() == pytest.approx(1.0, abs=0.02)  # infinite variance: it converges slowly


def test_a_stalling_device_loses_that_share_of_its_time() -> None:
    found = factors(Disturbances(stall_s=0.5, stall_every_s=4.0), 500_000)
    assert found.mean() == pytest.approx(1 + 0.5 / 4.0, rel=0.03)
    stalled = found[found > 1]
    assert stalled.min() * STEP_S == pytest.approx(0.5 + STEP_S)  # never less than a whole stall
    assert np.median(stalled) * STEP_S == pytest.approx(0.5 + STEP_S)


def test_stalls_come_at_the_same_times_whatever_is_run() -> None:
    """They do not depend on steps at all: a step that begins in a stall waits for its end."""
    stalls = Disturbances(stall_s=0.5, stall_every_s=2.0)
    busy, lazy, idle = (DisturbedTimes(stalls, 3) for _ in range(3))
    now_s = 0.0
    for _ in range(2000):
        seconds = busy.seconds(STEP_S, now_s)
        if seconds > STEP_S:  # stalls began during the step; the lazy device only starts then
            begin_s = now_s + STEP_S
            assert 0 <= seconds - lazy.seconds(STEP_S, begin_s) <= STEP_S
        now_s += seconds
    assert idle.seconds(STEP_S, now_s) == STEP_S


def test_one_long_step_is_held_up_by_every_stall_within_it() -> None:
    stalls = Disturbances(stall_s=0.5, stall_every_s=2.0)
    times, num_steps = DisturbedTimes(stalls, 3), 10_000
    in_many = float(factors(stalls, num_steps, seed=3).sum()) * STEP_S
    assert times.seconds(num_steps * STEP_S, 0.0) == pytest.approx(in_many)


@pytest.mark.parametrize("kind", ["noise", "drift", "tail", "stall_s"])
def test_each_is_reproducible_by_its_seed_and_leaves_the_others_alone(kind: str) -> None:
    alone = Disturbances(stall_every_s=1.0, **{kind: 0.1})
    first, again, other = (factors(alone, 3000, seed) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first == other).all() == (kind == "drift")
    if kind != "stall_s":
        stalling = factors(replace(alone, noise=0.2), 3000, 1) / factors(
            Disturbances(noise=0.2), 3000, 1
        )
        assert kind in ("noise", "drift") or stalling == pytest.approx(first)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("noise", -0.1),
        ("noise", math.nan),
        ("drift", -0.1),
        ("drift", 1.0),
        ("drift", math.nan),
        ("tail", 1.0),
        ("tail", math.nan),
        ("stall_s", -1.0),
        ("stall_s", math.inf),
        ("stall_every_s", 0.0),
    ],
)
def test_what_is_no_disturbance_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be"):
        Disturbances(**{field: value})


def test_disturbances_say_what_they_are() -> None:
    assert str(Disturbances()) == "none"
    assert str(Disturbances(0.1, tail=0.01)) == "noise 0.1, tail 0.01"
    assert str(Disturbances(stall_s=0.2)) == "stall_s 0.2, stall_every_s 10"
    assert Disturbances(stall_every_s=3.0).are_none


# In a replay


def make_trace(num_requests: int = 12) -> Trace:
    slo = SLO(1.0, 0.05)
    requests = [TraceRequest(f"r{i}", 0.5 * i, 50, 40, slo) for i in range(num_requests)]
    return Trace.of(requests, "a dozen")


@settings(max_examples=20)
@given(
    st.integers(0, 3),
    st.builds(
        Disturbances,
        noise=st.sampled_from((0.0, 0.2)),
        drift=st.sampled_from((0.0, 0.2)),
        tail=st.sampled_from((0.0, 0.1)),
        stall_s=st.sampled_from((0.0, 0.3)),
        stall_every_s=st.just(1.0),
    ),
)
def test_a_replay_takes_the_disturbed_times_and_none_else(
    seed: int, disturbances: Disturbances
) -> None:
    records: list[StepRecord] = []
    model = make_model()
    config = SimulationConfig(disturbances=disturbances, seed=seed)
    simulate(make_trace(), FCFS(), model, config, on_step=records.append)
    times = DisturbedTimes(disturbances, seed)
    for record in records:
        expected_s = times.seconds(model.predict(record.batch.shape), record.start_s)
        assert record.result.elapsed_s == expected_s


@pytest.mark.parametrize("bias", [0.8, 1.25])
def test_a_bias_is_the_schedulers_and_not_the_devices(bias: float) -> None:
    records: list[StepRecord] = []
    model = make_model()
    biased = SimulationConfig(bias=bias)
    requests = simulate(make_trace(), FCFS(), model, biased, on_step=records.append)
    for record in records:
        assert record.result.elapsed_s == model.predict(record.batch.shape)
        assert record.batch.predicted_s == pytest.approx(record.result.elapsed_s / bias)
    unbiased = simulate(make_trace(), FCFS(), model)  # fcfs does not predict
    assert [r.token_times_s for r in requests] == [r.token_times_s for r in unbiased]


@pytest.mark.parametrize("bias", [0.0, -1.0, math.inf, math.nan])
def test_a_bias_that_is_no_factor_is_refused(bias: float) -> None:
    with pytest.raises(ValueError, match="bias must be a positive, finite factor"):
        simulate(make_trace(), FCFS(), make_model(), SimulationConfig(bias=bias))
