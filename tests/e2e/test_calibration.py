"""The latency model that a server measures by itself: it is kept, judged, and measured anew."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from command_line import Said

from slosched.cli import calibration
from slosched.cli.calibration import calibrated_model
from slosched.cli.local_model import LocalModel, open_local
from slosched.cli.options import KVOptions, ModelOptions
from slosched.cli.profile_run import ProfileRun, run_profile
from slosched.core import Limits
from slosched.perfmodel import fit, read_profile
from slosched.perfmodel.graphs import PaddedLayers
from slosched.perfmodel.layered import LayeredModel

pytestmark = pytest.mark.e2e

SMALL = Limits(max_num_batched_tokens=64, max_num_seqs=4)


@pytest.fixture(scope="module")
def local() -> LocalModel:
    model = ModelOptions(model="tiny-random", device="cpu")
    return open_local(model, KVOptions(kv_tokens=512), Limits())


def make_poor(path: Path) -> None:
    """Give the stored model the errors of a measurement that was too short on a busy machine."""
    document = json.loads(path.read_text())
    document["held_out_error_percent"] |= {"mape": 21.4, "p99": 77.7}
    path.write_text(json.dumps(document))


def test_a_poor_calibration_says_so_at_every_start_until_it_is_measured_anew(
    local: LocalModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("SLOSCHED_CACHE", str(tmp_path))

    def start(*, anew: bool = False) -> str:
        calibrated_model(local, SMALL, 0.1, anew=anew)
        return " ".join(capsys.readouterr().out.split())

    said = start()
    assert "for at most 0.1 s, or for 24 steps if they take longer" in said
    (path,) = (tmp_path / "latency").glob("*.json")
    assert len(read_profile(path.with_suffix(".csv")).measurements) >= 24
    first = json.loads(path.read_text())
    error = first["held_out_error_percent"]
    assert f"wrong by {error['mape']:.1f} % on average and {error['p99']:.1f} % at p99" in said

    said = start()
    assert "profiling" not in said
    assert f"wrong by {error['mape']:.1f} % on average" in said
    assert f"measured {first['provenance']['date']}, --recalibrate does so anew" in said

    # What follows is about what is kept, for which one form will do: three quarters of the time.
    monkeypatch.setattr(calibration, "fit", partial(fit, form="linear"))
    make_poor(path)
    for _ in range(2):
        said = start()
        assert "wrong by 21.4 % on average and 77.7 % at p99" in said
        assert "warning: the latency model is wrong by 21 % on average, more than 15 %" in said
        assert "--recalibrate --calibrate 60s" in said

    said = start(anew=True)
    assert "profiling tiny-random" in said
    assert json.loads(path.read_text())["held_out_error_percent"]["mape"] != 21.4
    assert "21.4 %" not in start()

    path.write_text(path.read_text()[:100])  # as a full disk leaves it
    said = start()
    assert "the latency model that was kept is of no use" in said
    assert "measured now" in said
    assert "measured now" not in start()


@pytest.mark.parametrize(
    "other", [("--emulate", "rtx4090/llama-3.1-8b"), ("--latency-model", "rtx4090/llama-3.1-8b")]
)
def test_nothing_is_measured_anew_for_a_model_that_is_given(
    cli: Callable[..., Said], other: tuple[str, str]
) -> None:
    said = cli("serve", "--recalibrate", *other)
    assert said.status != 0
    assert f"--recalibrate measures nothing with {other[0]}" in said.complaint


def test_a_profile_of_padded_decodes_says_so_to_the_fit(tmp_path: Path) -> None:
    model = ModelOptions(model="tiny-random", device="cpu", graph_sizes="2,8", threads=1)
    local = open_local(model, KVOptions(kv_tokens=512), SMALL)
    path = tmp_path / "profile.csv"
    run_profile(local, SMALL, path, ProfileRun(num_batches=24, max_passes=1, time_limit_s=0.1))
    fitted = fit(read_profile(path), "roofline").model
    assert isinstance(fitted, LayeredModel)
    assert isinstance(fitted.layers, PaddedLayers)
    assert fitted.layers.graph_sizes == (2, 8)
