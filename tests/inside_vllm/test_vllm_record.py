"""A recording made inside vLLM's scheduler contains what vLLM ran, and is a profile like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Loop, make_config, make_scheduler, random_workload
from vllm.config import CUDAGraphMode

from slosched.core import SloschedError
from slosched.integrations.vllm import SLOScheduler
from slosched.integrations.vllm.record import provenance, recorder
from slosched.integrations.vllm.settings import Settings
from slosched.perfmodel import Measurement, load_model, read_profile
from slosched.perfmodel.measurement import MeasurementError

SEED = 3


def run(settings: dict[str, Any], *, is_async: bool) -> list[Any]:
    workload = random_workload(SEED)
    config = make_config(workload, is_async=is_async, settings=settings)
    return Loop(make_scheduler(SLOScheduler, config), workload, is_async).run()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_every_step_is_written_with_what_it_held(is_async: bool, tmp_path: Path) -> None:
    path = tmp_path / "new" / "steps.csv"
    settings = {"policy": "fcfs", "record": str(path)}
    steps = run(settings, is_async=is_async)
    ran = [[n for _, n in step.scheduled] for step in steps if step.scheduled]
    profile = read_profile(path)
    assert [[new for new, _ in m.chunks] for m in profile.measurements] == ran
    assert all(m.seconds > 0 for m in profile.measurements)
    # Every token of a request is computed after those before it.
    assert profile.measurements[0].chunks[0][1] == 0
    assert any(prior for m in profile.measurements for _, prior in m.chunks)
    assert profile.provenance["engine"].startswith("vllm ")
    heads = (profile.provenance[f"num_{kind}_heads"] for kind in ("query", "kv"))
    assert all(int(num_heads) > 0 for num_heads in heads)
    assert "num_experts" not in profile.provenance, "the model is dense"
    assert "graph_sizes" not in profile.provenance, "a CPU has no CUDA graphs"
    run(settings, is_async=is_async)
    assert len(read_profile(path).measurements) == 2 * len(ran), "the same device goes on"


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [("FULL_AND_PIECEWISE", "1,2,4"), ("FULL_DECODE_ONLY", "decodes:1,2,4"), ("NONE", None)],
)
def test_the_sizes_of_graphs_are_kept_with_the_steps_that_have_them(
    mode: str, sizes: str | None
) -> None:
    config = make_config(random_workload(SEED))
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    config.compilation_config.cudagraph_capture_sizes = [1, 2, 4]
    assert provenance(config, "a GPU", 100).get("graph_sizes") == sizes


def test_another_engine_writes_another_file_and_more_devices_another_profile(
    tmp_path: Path,
) -> None:
    path = tmp_path / "steps.csv"
    settings = Settings(record=str(path))
    facts = dict.fromkeys(("model", "device", "engine", "dtype"), "same")
    one = facts | {"tensor_parallel_size": "1", "pipeline_parallel_size": "1"}
    step = Measurement(((16, 0),), 0.5)
    for engine in (0, 1):
        record = recorder(settings, one, engine)
        assert record is not None
        record(step)
    assert {file.name for file in tmp_path.iterdir()} == {"steps.csv", "steps-1.csv"}
    assert len(read_profile(path).measurements) == 1
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        with pytest.raises(SloschedError, match=f"another {name} .'1', now '2'"):
            recorder(settings, one | {name: "2"})
    path.write_text(f"# slosched profile {json.dumps(facts)}\nbatch,seconds\n16@0,0.5\n")
    assert recorder(settings, one) is not None, "older files say nothing of one device"
    with pytest.raises(SloschedError, match=r"another tensor_parallel_size .'1', now '2'"):
        recorder(settings, one | {"tensor_parallel_size": "2"})


def test_a_file_of_something_else_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text('# slosched profile {"model": "another"}\nbatch,seconds\n16@0,0.5\n')
    before = path.read_text()
    with pytest.raises(SloschedError, match="another model"):
        run({"policy": "fcfs", "record": str(path)}, is_async=False)
    path.write_text("shopping list\n")
    with pytest.raises(MeasurementError, match="not a profile"):
        run({"policy": "fcfs", "record": str(path)}, is_async=False)
    assert before != path.read_text() == "shopping list\n"


def test_a_slow_device_takes_so_many_times_as_long() -> None:
    from slosched.core import BatchShape
    from slosched.integrations.vllm.settings import SettingsError, read_settings

    shape = BatchShape()
    shape.add(100, 0)
    name = "h100/llama-3.1-8b"
    settings = read_settings({"slosched": {"emulate": name, "emulate_slowdown": 4}})
    device = settings.make_device()
    assert device is not None
    assert device.predict(shape) == pytest.approx(4 * load_model(name).predict(shape))
    assert settings.make_model("whatever") is not None
    with pytest.raises(SettingsError, match="emulate_slowdown"):
        read_settings({"slosched": {"emulate": name, "emulate_slowdown": 0}})
