"""Steps composed from operator times: sums are right, and the real tables give the CSV files."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from slosched.perfmodel import read_profile
from slosched.perfmodel.aiconfigurator import (
    VERSION,
    Deployment,
    MissingTablesError,
    OperatorTables,
    OperatorTime,
    compose_profile,
    layer_batches,
)
from slosched.perfmodel.measurement import Measurement, Part
from slosched.perfmodel.stress import StressLimits

FOLDER = Path(__file__).parents[2] / "profiling" / "aiconfigurator"
CSVS = sorted(FOLDER.glob("*/*.csv"))


def installed() -> bool:
    try:
        return importlib.metadata.version("aiconfigurator-core") == VERSION
    except importlib.metadata.PackageNotFoundError:
        return False


needs_tables = pytest.mark.skipif(
    not installed(), reason=f"aiconfigurator-core {VERSION} is not installed"
)


class Formulas:
    """An engine whose operators have prices that can be added up by hand, in milliseconds."""

    PREFILL = ("context_embedding", "context_attention", "context_ffn", "context_logits_gemm")
    DECODE = ("generation_attention", "generation_ffn", "generation_logits_gemm")

    def evaluate_context_ops(
        self, indices: list[int], *, batch_size: int, s: int, prefix: int = 0, x: int | None = None
    ) -> list[OperatorTime]:
        prices = {
            "context_embedding": 1.0,
            "context_attention": 5.0 if not prefix else 0.001 * s * prefix,
            "context_ffn": 0.1 * (x or 0),
            "context_logits_gemm": 1e9,  # must not be used: the decode's output projection is
        }
        return rows(self.PREFILL, prices, indices)

    def evaluate_generation_ops(
        self, indices: list[int], *, batch_size: int, s: int
    ) -> list[OperatorTime]:
        prices = {
            "generation_attention": 0.01 * batch_size * s,
            "generation_ffn": 1e9,
            "generation_logits_gemm": 0.5 * batch_size,
        }
        return rows(self.DECODE, prices, indices)


def rows(
    names: tuple[str, ...], prices: dict[str, float], indices: list[int]
) -> list[OperatorTime]:
    if max(indices) >= len(names):
        raise ValueError(f"index {max(indices)} out of range")
    return [(names[i], prices[names[i]], 0.0, "silicon") for i in indices]


TABLES = OperatorTables.of(Formulas())


def test_layers_are_all_operators_but_attention() -> None:
    assert TABLES.layers_s(((30, 0), (1, 99))) == pytest.approx((1 + 0.1 * 31 + 0.5 * 2) / 1e3)


def test_a_step_adds_the_attention_of_each_chunk_and_of_all_decodes() -> None:
    chunks = ((30, 0), (20, 2000), (1, 99), (1, 299))
    attention_ms = 5.0 + 0.001 * 20 * 2000 + 0.01 * 2 * 200
    layers_ms = 1e3 * TABLES.layers_s(chunks)
    assert 1e3 * TABLES.step_s(chunks) == pytest.approx(layers_ms + attention_ms)


def test_prior_context_never_makes_a_chunk_faster_than_what_was_measured() -> None:
    assert 1e3 * TABLES.chunk_attention_s(10, 0) == pytest.approx(5.0)
    assert 1e3 * TABLES.chunk_attention_s(10, 100) == pytest.approx(5.0), "the chunk alone"
    assert 1e3 * TABLES.chunk_attention_s(2, 1000) == pytest.approx(10.02), "one decode's read"
    assert 1e3 * TABLES.chunk_attention_s(100, 1000) == pytest.approx(100.0), "the scaled one"


def test_a_model_with_two_kinds_of_attention_is_refused() -> None:
    class Hybrid(Formulas):
        PREFILL = ("context_attention", "context_attention")

    with pytest.raises(MissingTablesError, match=r"one operator 'context_attention', not 2"):
        OperatorTables.of(Hybrid())


def test_the_layers_are_asked_for_on_both_sides_of_every_tile_edge() -> None:
    batches = layer_batches(StressLimits(max_num_batched_tokens=2048, max_num_seqs=100))
    prefills = [batch[0][0] for batch in batches if len(batch) == 1]
    decodes = [len(batch) for batch in batches if len(batch) > 1]
    assert prefills == sorted(set(prefills))
    assert {1, 2, 16, 17, 256, 257, 512, 513, 1024, 1025, 2048} < set(prefills)
    assert max(prefills) == 2048
    assert decodes == [size for size in prefills if 1 < size <= 100]
    assert all(batch in (((batch[0][0], 0),), ((1, 0),) * len(batch)) for batch in batches)


def test_the_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    monkeypatch.setitem(sys.modules, "aiconfigurator_core.sdk.engine", None)
    with pytest.raises(MissingTablesError, match=r"pip install 'slosched\[aiconfigurator\]'"):
        compose_profile(Deployment("h200_sxm", "meta-llama/Meta-Llama-3.1-8B"))


def test_a_backend_without_tables_is_named() -> None:
    with pytest.raises(ValueError, match="no backend 'tgi'; it has vllm, sglang, trtllm"):
        Deployment("h200_sxm", "Qwen/Qwen3-8B", "tgi")


@pytest.mark.parametrize("path", CSVS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_committed_csv_holds_what_a_fit_needs(path: Path) -> None:
    profile = read_profile(path)
    steps = [m for m in profile.measurements if m.part is Part.STEP]
    layers = [m for m in profile.measurements if m.part is Part.LAYERS]
    assert len(steps) == 160
    assert {m.regime for m in steps} == {"decode", "prefill", "mixed"}
    assert len(layers) > 200
    assert "additive by construction" in profile.provenance["not_in_it"]
    assert "estimate" in profile.provenance["kv_capacity_origin"]
    capacity = int(profile.provenance["kv_capacity_tokens"])
    assert max(kv_tokens(m) for m in steps) <= capacity
    assert path.stat().st_size < 40_000


def kv_tokens(measurement: Measurement) -> int:
    return sum(new + prior for new, prior in measurement.chunks)


def test_all_gpus_that_were_asked_for_are_committed() -> None:
    assert {f"{path.parent.name}/{path.stem}" for path in CSVS} == {
        source.name for source in script().SOURCES
    }


@needs_tables
@pytest.mark.parametrize("name", ["h200/llama-3.1-8b", "a100/llama-3.1-70b-tp4"])
def test_composing_again_gives_the_committed_csv(name: str) -> None:
    source = next(s for s in script().SOURCES if s.name == name)
    composed = script().fitted_steps(source)
    committed = read_profile(FOLDER / f"{name}.csv")
    assert composed.provenance == committed.provenance
    assert [m.chunks for m in composed.measurements] == [m.chunks for m in committed.measurements]
    assert [m.seconds for m in composed.measurements] == pytest.approx(
        [m.seconds for m in committed.measurements],
        abs=1e-9,  # the file holds nanoseconds
    )


@needs_tables
@pytest.mark.parametrize(
    ("deployment", "reason"),
    [
        (Deployment("h900", "Qwen/Qwen3-8B"), "no queryable versions"),
        (Deployment("h200_sxm", "Qwen/Qwen3-8B", tensor_parallel=3), "divisible"),
        (Deployment("l40s", "meta-llama/Meta-Llama-3.1-70B"), "no KV budget"),
    ],
)
def test_what_the_tables_do_not_hold_is_said(deployment: Deployment, reason: str) -> None:
    with pytest.raises(MissingTablesError, match=reason) as caught:
        compose_profile(deployment)
    assert deployment.system in str(caught.value)


def script() -> ModuleType:
    """Import profiling/aiconfigurator/compose.py, a script that is in no package."""
    spec = importlib.util.spec_from_file_location("compose_aic", FOLDER / "compose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["compose_aic"] = module
    spec.loader.exec_module(module)
    return module
