"""A model file keeps what a server adds to its device, and each form can be made longer by it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_model
from synthetic_steps import make_measurements, make_shape, random_batches

from slosched.core import BatchShape
from slosched.perfmodel import (
    NO_SERVER_TIME,
    FittedModel,
    Profile,
    ServerTime,
    at_block_size,
    fit,
    load_model,
    read_profile,
    save_model,
    scaled,
    with_longer_steps,
    write_profile,
)
from slosched.perfmodel.fit_report import server_said
from slosched.perfmodel.forms import described
from slosched.perfmodel.measurement import MeasurementError, append_server_time
from slosched.perfmodel.store import ModelFileError

TIMES = ServerTime(0.009, 0.0003, 0.001)
LAYERED = "h100/llama-3.1-8b"


def served(name: str = LAYERED) -> FittedModel:
    model = load_model(name)
    return described(model, model.provenance, model.held_out_error, server_time=TIMES, noise=0.05)


def test_the_times_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save_model(served(), path)
    loaded = load_model(path)
    assert (loaded.server_time, loaded.noise) == (TIMES, 0.05)


def test_a_file_without_them_is_of_the_bare_device(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    save_model(make_model(), path)
    assert not {"server_time", "noise"} & json.loads(path.read_text()).keys()
    loaded = load_model(path)
    assert (loaded.server_time, loaded.noise) == (NO_SERVER_TIME, 0.0)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"server_time": {"per_request_s": -1.0}},
        {"server_time": {"per_step_ms": 1.0}},
        {"noise": -0.1},
    ],
)
def test_a_file_with_senseless_times_is_refused(tmp_path: Path, spoilt: dict[str, object]) -> None:
    path = tmp_path / "model.json"
    save_model(served(), path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **spoilt}))
    with pytest.raises(ModelFileError, match=r"model\.json is not a latency model"):
        load_model(path)


def test_a_model_that_is_changed_keeps_them() -> None:
    for changed in (
        scaled(served(), 2.0),
        at_block_size(served(), 32),
        with_longer_steps(served(), 0.001),
        pickle.loads(pickle.dumps(served())),
    ):
        assert (changed.server_time, changed.noise) == (TIMES, 0.05)


@pytest.mark.parametrize("model", [make_model(), load_model(LAYERED)], ids=["linear", "layered"])
def test_every_step_takes_the_added_time_longer(model: FittedModel) -> None:
    longer = with_longer_steps(model, 0.25)
    for shape in (
        make_shape((1, 100)),
        make_shape((512, 0)),
        make_shape((512, 0), (1, 10), (1, 2000)),
        make_shape((1, 9), num_swapped_blocks=3),
        make_shape((40_000, 0)),
    ):
        assert longer.predict(shape) == pytest.approx(model.predict(shape) + 0.25)
    assert longer.predict(BatchShape()) == 0.0


def test_nothing_added_leaves_the_very_same_model() -> None:
    model = make_model()
    assert with_longer_steps(model, 0.0) is model


def test_planning_ahead_hides_the_host_and_nothing_else() -> None:
    assert TIMES.per_step_s(overlap=True) == 0.0003
    assert TIMES.per_step_s(overlap=False) == pytest.approx(0.0013)


@pytest.mark.parametrize("name", ["per_request_s", "per_step_device_s", "per_step_host_s"])
@pytest.mark.parametrize("seconds", [-1e-9, float("inf"), float("nan")])
def test_times_are_finite_and_not_negative(name: str, seconds: float) -> None:
    with pytest.raises(ValueError, match=name):
        replace(NO_SERVER_TIME, **{name: seconds})


def test_it_describes_itself() -> None:
    assert str(NO_SERVER_TIME) == "nothing"
    assert str(TIMES) == ("9 ms a request, 0.3 ms a step on the device, 1 ms a step on the host")


def test_a_fit_keeps_what_the_profile_says_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    write_profile(Profile(make_measurements(random_batches(60), make_model())), path)
    append_server_time(ServerTime(per_request_s=1.0), path)
    append_server_time(TIMES, path)
    assert read_profile(path).server_time == TIMES, "the last one counts"
    assert fit(read_profile(path), "linear").model.server_time == TIMES


def test_a_profile_with_a_senseless_server_time_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.csv"
    write_profile(Profile(make_measurements(random_batches(20), make_model())), path)
    path.write_text(path.read_text() + '# slosched server {"per_request_s": -1}\n')
    with pytest.raises(MeasurementError, match=r"line 23: per_request_s"):
        read_profile(path)


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_a_fit_finds_how_single_steps_scatter(noise: float) -> None:
    batches = random_batches(120)
    passes = [make_measurements(batches, make_model(), noise=noise, seed=i) for i in range(4)]
    report = fit(Profile(tuple(row for rows in passes for row in rows)), "linear")
    assert report.model.noise == pytest.approx(noise, rel=0.15)
    assert f"scatter about the model by {100 * report.model.noise:.1f} %" in server_said(
        report.model
    )


def test_a_table_says_nothing_of_single_steps_and_a_recording_does() -> None:
    rows = make_measurements(random_batches(120), make_model(), noise=0.1)
    assert fit(Profile(rows), "linear").model.noise == 0.0
    recorded = Profile(rows, {"method": "recorded while vLLM served"})
    assert fit(recorded, "linear").model.noise == pytest.approx(0.1, rel=0.25)
