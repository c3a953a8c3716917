"""The measurements for a GPU are rehearsed on a CPU, with a tiny model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from profiling.gpu.__main__ import BUNDLED, PREDICTIONS, STAGES
from profiling.gpu.report import page_of, write_page
from profiling.gpu.results import ResultsError, Rows, noted
from profiling.gpu.scale import ON_GPU, REHEARSAL
from profiling.gpu.swaps import measure_swaps
from profiling.gpu.traffic import PREDICTED, predict_all, replay_all, replay_of


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the results of every stage but the traffic."""
    out = tmp_path_factory.mktemp("gpu")
    for name, stage in STAGES.items():
        if name != "traffic":
            with noted(out, name, REHEARSAL):
                stage(REHEARSAL, out)
    return out


@pytest.mark.slow
def test_the_stages_leave_results(results: Path) -> None:
    conformance = pd.read_csv(results / "conformance.csv")
    assert (conformance["error"] <= conformance["allowed"]).all()
    assert set(conformance["backend"]) == set(REHEARSAL.backends or ())
    fitted = pd.read_csv(results / "fit.csv")
    assert {"all", "decode", "prefill", "mixed"} <= set(fitted["regime"])
    assert len(pd.read_csv(results / "swap.csv")) == 2 * len(REHEARSAL.swap_blocks)
    rooflines = pd.read_csv(results / "roofline.csv")
    assert set(rooflines["step"]) == {"decode", "chunk"}
    assert (rooflines["memory_roofline_s"] > 0).all()
    assert (rooflines["overlapped_s"] > 0).all()
    graphs = rooflines.groupby("step")["graphs"].agg(set).to_dict()
    assert graphs == {"decode": {"on", "off"}, "chunk": {"off"}}


@pytest.mark.slow
def test_the_traffic_is_predicted_played_and_reported(results: Path) -> None:
    scale = replace(REHEARSAL, rates={"azure_conv": (20.0,)})
    (results / PREDICTED).unlink()
    with pytest.raises(ResultsError, match="run the stage `predict`"):
        replay_all(scale, results)
    predict_all(scale, results)
    with noted(results, "traffic", scale):
        replay_all(scale, results)
    played = pd.read_csv(results / "traffic.csv").to_dict("records")
    predicted = json.loads((results / PREDICTED).read_text("utf-8"))
    assert {replay_of(row) for row in played} == {replay_of(row) for row in predicted}
    assert {row["policy"] for row in played if row["overlap"]} == {"goodput"}
    assert page_of(results) == results / "gpu.md"  # not in the docs
    write_page(results, PREDICTIONS, page_of(results))
    page = (results / "gpu.md").read_text("utf-8")
    assert "A rehearsal" in page
    assert "missing" not in page


def test_an_interrupted_stage_goes_on(tmp_path: Path) -> None:
    measure_swaps(replace(REHEARSAL, swap_blocks=(1, 4)), tmp_path)
    path = tmp_path / "swap.csv"
    whole = path.read_text("utf-8")
    # The last row is cut off in its middle, and the one before it is whole.
    path.write_text(whole[: whole.rindex(",")], "utf-8")
    measure_swaps(replace(REHEARSAL, swap_blocks=(1, 4)), tmp_path)
    again = path.read_text("utf-8")
    assert len(again.splitlines()) == 5
    assert again.splitlines()[:4] == whole.splitlines()[:4]


def test_results_of_another_kind_are_refused(tmp_path: Path) -> None:
    Rows(tmp_path / "some.csv", ("a", "b"), 1).add(1, 2)
    with pytest.raises(ResultsError, match="has the columns a, b, not a, c"):
        Rows(tmp_path / "some.csv", ("a", "c"), 1)
    with noted(tmp_path, "swap", REHEARSAL):
        pass
    other = replace(REHEARSAL, model=replace(REHEARSAL.model, model="other"))
    with pytest.raises(ResultsError, match="another model"), noted(tmp_path, "swap", other):
        pass


def test_every_replay_on_a_gpu_is_predicted_beforehand() -> None:
    predicted = json.loads(PREDICTIONS.read_text("utf-8"))
    assert predicted.keys() == set(BUNDLED)
    for rows in predicted.values():
        assert [replay_of(row) for row in rows] == ON_GPU.replays()
        assert all(0 <= row["attainment"] <= 1 for row in rows)
