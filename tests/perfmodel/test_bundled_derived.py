"""The model that was derived, not measured: its provenance, and the error of the derivation."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from slosched.core import BatchShape
from slosched.perfmodel import load_model

ROOT = Path(__file__).parents[2]
PERF = ROOT.parent / "shared" / "data" / "llmservingsim"
NAME = "rtx4090/llama-3.2-3b"

needs_tables = pytest.mark.skipif(
    not PERF.exists(), reason=f"LLMServingSim's tables are not at {PERF}"
)


@pytest.fixture
def derive(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Import profiling/llmservingsim/derive.py, a script that imports compose.py next to it."""
    monkeypatch.syspath_prepend(str(ROOT / "profiling" / "llmservingsim"))
    monkeypatch.delitem(sys.modules, "compose", raising=False)
    yield importlib.import_module("derive")
    for name in ("derive", "compose"):
        sys.modules.pop(name, None)


def shape_of(*chunks: tuple[int, int]) -> BatchShape:
    shape = BatchShape()
    for chunk in chunks:
        shape.add(*chunk)
    return shape


def test_it_says_plainly_that_nobody_measured_it() -> None:
    said = load_model(NAME).provenance
    assert said["origin"] == "roofline estimate"
    assert "NOT MEASURED" in said["method"]
    assert said["model"] == "meta-llama/Llama-3.2-3B"


def test_a_decode_takes_about_as_long_as_reading_the_weights() -> None:
    """The floor is the time to read 3.21 G parameters in bfloat16 at 1008 GB/s."""
    floor_s = 2 * 3.21 / 1008
    assert 0.95 * floor_s < load_model(NAME).predict(shape_of((1, 500))) < 1.5 * floor_s


@pytest.mark.parametrize(
    "chunks", [((1, 500),), ((1, 2000),) * 16, ((2048, 0),), ((256, 8192), *((1, 500),) * 30)]
)
def test_it_is_faster_than_the_larger_model_but_not_by_more_than_its_size(
    chunks: tuple[tuple[int, int], ...],
) -> None:
    small_s = load_model(NAME).predict(shape_of(*chunks))
    large_s = load_model("rtx4090/llama-3.1-8b").predict(shape_of(*chunks))
    assert 3.21 / 8.03 < small_s / large_s < 28 / 32


def test_the_sizes_are_those_of_the_models(derive: ModuleType) -> None:
    """The sizes are the published numbers of parameters, without norms (below 0.01 %)."""
    assert derive.LLAMA_8B.weight_bytes / 2 == pytest.approx(8.03e9, rel=0.001)
    assert derive.LLAMA_3B.weight_bytes / 2 == pytest.approx(3.21e9, rel=0.002)
    assert derive.QWEN_32B.weight_bytes / 2 == pytest.approx(32.76e9, rel=0.001)
    assert derive.LLAMA_8B.kv_bytes_per_token == 131_072
    assert derive.kv_capacity_tokens() == pytest.approx(131_000, rel=0.01)


@needs_tables
def test_the_same_derivation_comes_close_where_it_can_be_checked(derive: ModuleType) -> None:
    """Qwen3-32B is four times as large, with twice the layers and another group size."""
    error = derive.check(PERF)
    assert error.count > 10_000
    assert error.mape < 4
    assert error.p99 < 12
    assert load_model(NAME).held_out_error["p99"] == pytest.approx(error.p99)


@needs_tables
def test_nothing_changes_if_nothing_is_scaled(derive: ModuleType) -> None:
    source = derive.SOURCES[0]
    model = derive.derive(source, derive.LLAMA_8B, derive.LLAMA_8B, PERF)
    measured = load_model(source.name)
    for chunks in (((1, 500),), ((700, 300),), ((64, 4096), *((1, 900),) * 40)):
        shape = shape_of(*chunks)
        assert model.predict(shape) == pytest.approx(measured.predict(shape), rel=1e-3)


@needs_tables
def test_deriving_again_gives_the_bundled_model(derive: ModuleType) -> None:
    model, bundled = derive.derived_model(PERF), load_model(NAME)
    assert model.provenance == bundled.provenance
    assert model.held_out_error == pytest.approx(bundled.held_out_error)
    for chunks in (((1, 500),), ((700, 300),), ((64, 4096), *((1, 900),) * 40)):
        shape = shape_of(*chunks)
        assert model.predict(shape) == pytest.approx(bundled.predict(shape), rel=1e-9)
