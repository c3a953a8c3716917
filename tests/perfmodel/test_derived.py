"""Step times of GPUs without tables, derived from GPUs with tables."""

from __future__ import annotations

import json

import numpy as np
import pytest
from aiconfigurator_tables import needs_tables
from factories import make_model

from slosched.perfmodel import load_model
from slosched.perfmodel.aiconfigurator import (
    UNMEASURED,
    Deployment,
    MissingTablesError,
    NoRoomError,
    OperatorTables,
    derive_profile,
    system_of,
)
from slosched.perfmodel.aiconfigurator.derived import (
    Reference,
    derivation_error,
    derived_tables,
    references_of,
)
from slosched.perfmodel.derivation import DERIVATION_ERROR, with_derivation_error
from slosched.perfmodel.errors import report_errors
from slosched.perfmodel.forms import described
from slosched.perfmodel.measurement import Measurement, Part, Profile
from slosched.perfmodel.peaks import Peaks
from slosched.perfmodel.stress import StressLimits, stress_batches

LLAMA_8B = "meta-llama/Meta-Llama-3.1-8B"
BATCHES = (
    ((1, 1000),),
    ((1, 2000),) * 64,
    ((2048, 0),),
    ((512, 4096), *((1, 1000),) * 32),
)


@pytest.fixture(scope="module")
def references() -> tuple[Reference, ...]:
    return references_of(Deployment("l4", LLAMA_8B))


def times_s(tables: OperatorTables) -> list[float]:
    return [tables.step_s(batch) for batch in BATCHES]


@needs_tables
def test_a_gpu_that_is_derived_from_itself_is_itself(references: tuple[Reference, ...]) -> None:
    for reference in references:
        again = derived_tables([reference], reference.peaks)
        assert times_s(again) == pytest.approx(times_s(reference.compiled.tables()))


@needs_tables
def test_faster_memory_and_arithmetic_make_every_step_faster(
    references: tuple[Reference, ...],
) -> None:
    slow, more_arithmetic, more_memory, both = (
        times_s(derived_tables(references, Peaks(flops, rate)))
        for flops, rate in ((1e14, 1e12), (2e14, 1e12), (1e14, 2e12), (2e14, 2e12))
    )
    for i in range(len(BATCHES)):
        assert both[i] <= min(more_arithmetic[i], more_memory[i])
        assert max(more_arithmetic[i], more_memory[i]) <= slow[i]
        assert slow[i] < 2 * both[i], "launches do not scale"
    assert more_memory[0] < 0.65 * slow[0], "a decode reads weights"
    assert more_arithmetic[2] < 0.65 * slow[2], "a prefill multiplies"


@needs_tables
def test_gpus_with_tables_are_derived_from_the_others_within_thirty_percent(
    references: tuple[Reference, ...],
) -> None:
    assert {reference.system for reference in references} == {
        "h100_sxm",
        "a100_sxm",
        "b200_sxm",
        "l40s",
        "rtx_pro_6000_server",
    }
    batches = stress_batches(StressLimits(kv_capacity_tokens=100_000), 40, seed=3)
    error = derivation_error(references, batches)
    assert error.count == 5 * 40
    assert 5 < error.mape < 15
    assert error.p99 < 40


@needs_tables
@pytest.mark.parametrize(("regime", "most"), [("decode", 20), ("prefill", 40), ("mixed", 35)])
def test_a_gpu_that_others_measured_is_too_slow_by_less_than(
    references: tuple[Reference, ...], regime: str, most: float
) -> None:
    """LLMServingSim measured the RTX 4090, of which AIConfigurator has no tables."""
    measured = load_model("rtx4090/llama-3.1-8b")
    limits = StressLimits(2048, 256, 16_384, 41_408)
    steps = [Measurement(batch, 1.0) for batch in stress_batches(limits, 100, seed=1)]
    steps = [
        Measurement(step.chunks, measured.predict(step.shape))
        for step in steps
        if step.regime == regime
    ]
    tables = derived_tables(references, UNMEASURED["rtx4090"].peaks)
    error = report_errors(np.array([tables.step_s(step.chunks) for step in steps]), steps)
    assert error.mape < most


@pytest.fixture(scope="module")
def l4() -> Profile:
    return derive_profile(
        Deployment("l4", LLAMA_8B),
        max_num_batched_tokens=2048,
        max_num_seqs=64,
        num_steps=30,
        seed=0,
    )


@needs_tables
def test_a_derived_profile_says_that_nobody_measured_it(l4: Profile) -> None:
    said = l4.provenance
    assert said["gpu"] == "NVIDIA L4"
    assert said["origin"] == "derived from other GPUs"
    assert said["method"].startswith("NOT MEASURED")
    assert "300 GB/s" in said["source"]
    assert 0 < int(said["kv_capacity_tokens"]) < 40_000, "24 GiB less 15 GiB of weights"
    assert 0 < json.loads(said[DERIVATION_ERROR])["mape"] < 20


@needs_tables
def test_a_decode_step_takes_about_as_long_as_reading_the_weights(l4: Profile) -> None:
    alone_s = next(m.seconds for m in l4.measurements if m.chunks == ((1, 0),))
    assert l4.measurements[0].part is Part.LAYERS
    assert 15.0 / 300 < alone_s < 1.5 * 15.0 / 300


@needs_tables
@pytest.mark.parametrize(
    ("deployment", "error", "reason"),
    [
        (Deployment("l4", LLAMA_8B, tensor_parallel=2), ValueError, r"--tp 2: .*all-reduces"),
        (Deployment("l4", "openai/gpt-oss-20b"), MissingTablesError, "only times of bfloat16"),
        (Deployment("l4", "Qwen/Qwen3-32B"), NoRoomError, "into the 24 GiB of l4"),
    ],
)
def test_what_cannot_be_derived_is_said(
    deployment: Deployment, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        derive_profile(
            deployment, max_num_batched_tokens=2048, max_num_seqs=64, num_steps=16, seed=0
        )


@pytest.mark.parametrize("gpu", ["L4", "h100-pcie", "H100_PCIe", "rtx-3090"])
def test_gpus_without_tables_are_found_by_name(gpu: str) -> None:
    assert system_of(gpu) in UNMEASURED


def test_a_model_of_derived_steps_has_the_error_of_the_derivation() -> None:
    """Not that of its form, which says nothing of how wrong the steps are."""
    facts = {DERIVATION_ERROR: '{"count": 500, "mape": 10.0, "p99": 27.0, "under_p99": 20.0}'}
    model = described(make_model(), facts, {"count": 40, "fitted": 160, "mape": 0.5, "p99": 2.0})
    assert dict(with_derivation_error(model).held_out_error) == {
        "count": 500,
        "fitted": 160,
        "mape": 10.0,
        "p99": 27.0,
        "under_p99": 20.0,
    }


def test_a_model_of_measured_steps_keeps_its_error() -> None:
    model = load_model("rtx4090/llama-3.1-8b")
    assert with_derivation_error(model) is model
