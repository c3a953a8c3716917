"""The bundled models of real GPUs: they say where they come from, and they fit their data."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script
from synthetic_steps import make_shape, random_batches

from slosched.core import BatchShape, Limits, Request
from slosched.perfmodel import (
    FITTERS,
    ErrorReport,
    OnlineModel,
    bundled_models,
    fit,
    load_model,
    read_profile,
)
from slosched.perfmodel.derivation import DERIVATION_ERROR
from slosched.policy import FCFS
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace, TraceRequest

ROOT = Path(__file__).parents[2]
PERF = ROOT.parent / "shared" / "data" / "llmservingsim"
COMPOSED = ("rtx4090/llama-3.1-8b", "rtxpro6000/llama-3.1-8b", "rtxpro6000/qwen3-32b")

needs_tables = pytest.mark.skipif(
    not PERF.exists(), reason=f"LLMServingSim's tables are not at {PERF}"
)


@pytest.fixture(scope="module")
def compose() -> ModuleType:
    """Import profiling/llmservingsim/compose.py, a script that is in no package."""
    return load_script("profiling/llmservingsim/compose.py")


def test_the_gpus_are_there() -> None:
    assert set(COMPOSED) <= set(bundled_models())


@pytest.mark.parametrize("name", bundled_models())
def test_a_bundled_model_says_where_it_comes_from_and_how_wrong_it_is(name: str) -> None:
    model = load_model(name)
    is_cpu = name.startswith("cpu/")
    device = "device" if is_cpu else "gpu"
    for key in (device, "model", "engine", "source", "licence", "method", "not_in_it", "origin"):
        assert model.provenance[key].strip(), key
    assert int(model.provenance["kv_capacity_tokens"]) >= 16_384
    assert model.provenance["kv_capacity_origin"]
    assert model.held_out_error["count"] > (50 if is_cpu else 100)
    is_derived = DERIVATION_ERROR in model.provenance
    assert 0 < model.held_out_error["mape"] < (10 if is_cpu else 15 if is_derived else 4)
    # The CPU's errors are larger because of noise and its small cache: profiling/cpu/README.md.
    assert 0 < model.held_out_error["under_p99"] < (50 if is_cpu else 40 if is_derived else 15)


@pytest.mark.parametrize(
    ("name", "weights_gb", "bandwidth_gb_s"),
    [
        ("rtx4090/llama-3.1-8b", 15.0, 1008),
        ("rtxpro6000/llama-3.1-8b", 15.0, 1597),
        ("rtxpro6000/qwen3-32b", 64.0, 1597),
    ],
)
def test_a_decode_step_takes_about_as_long_as_reading_the_weights(
    name: str, weights_gb: float, bandwidth_gb_s: float
) -> None:
    """The floor is bfloat16 weights without the input embedding, over the peak bandwidth."""
    model = load_model(name)
    floor_s = weights_gb / bandwidth_gb_s
    alone = BatchShape()
    alone.add(1, 500)
    assert 0.95 * floor_s < model.predict(alone) < 1.5 * floor_s
    batch = BatchShape()
    for _ in range(32):
        batch.add(1, 500)
    assert model.predict(alone) < model.predict(batch) < 2 * model.predict(alone)
    assert model.predict_prefill(2048) > 3 * model.predict(batch), "a full step is compute-bound"


@pytest.mark.parametrize("name", COMPOSED)
def test_the_committed_steps_give_the_bundled_model(name: str) -> None:
    """The committed steps are those that the model was fitted to, rounded to nanoseconds."""
    bundled = load_model(name)
    profile = read_profile(ROOT / "profiling" / f"{name}.csv")
    report = fit(profile, bundled.form, num_folds=2)
    assert report.train.count == bundled.held_out_error["fitted"]
    steps = report.held_out_measurements
    again = [report.model.predict(m.shape) for m in steps]
    assert again == pytest.approx([bundled.predict(m.shape) for m in steps], rel=2e-3)
    assert dict(report.model.provenance) == dict(bundled.provenance)


def test_on_real_gpus_the_kernels_have_to_be_known() -> None:
    """Each form beats the simpler one before it on held-out steps, so the joint one is chosen."""
    report = fit(read_profile(ROOT / "profiling" / "rtx4090" / "llama-3.1-8b.csv"), num_folds=3)
    assert report.model.form == "profiled-joint"
    errors = [e for e in report.considered.values() if isinstance(e, ErrorReport)]
    assert list(report.considered) == list(FITTERS)
    assert all(better.mape < 0.9 * worse.mape for worse, better in pairwise(errors))


@pytest.mark.parametrize("name", bundled_models())
def test_one_more_request_never_makes_a_step_faster(name: str) -> None:
    """A first chunk that joins decodes is an exception: it changes the kernel, by 2.5 % at most."""
    model = load_model(name)
    batches = random_batches(300)
    for batch, more in pairwise(batches):
        chunk = more[0]
        before_s = model.predict(make_shape(*batch))
        after_s = model.predict(make_shape(*batch, chunk))
        had_chunk = any(new > 1 for new, _ in batch)
        assert after_s >= before_s * (1 - 1e-9 if had_chunk else 0.975), (batch, chunk)


@needs_tables
@pytest.mark.parametrize(
    "index",
    [0, *(pytest.param(i, marks=pytest.mark.slow) for i in range(1, len(COMPOSED)))],
)
def test_composing_and_fitting_again_gives_the_bundled_model(
    compose: ModuleType, index: int
) -> None:
    source = compose.SOURCES[index]
    bundled = load_model(source.name)
    report = fit(compose.compose(source, PERF), bundled.form)
    steps = report.held_out_measurements[:500]
    again = [report.model.predict(m.shape) for m in steps]
    assert again == pytest.approx([bundled.predict(m.shape) for m in steps], rel=1e-4)
    assert report.model.held_out_error == pytest.approx(dict(bundled.held_out_error), rel=1e-3)
    assert dict(report.model.provenance) == dict(bundled.provenance)


@needs_tables
@pytest.mark.parametrize(
    ("name", "served", "max_num_seqs", "kv_capacity_tokens"),
    [
        ("rtx4090/llama-3.1-8b", "RTX4090/Llama-3.1-8B", 256, 41_408),
        ("rtxpro6000/llama-3.1-8b", "RTXPRO6000/Llama-3.1-8B", 128, 520_000),
    ],
)
def test_a_simulated_replica_is_as_fast_as_the_real_vllm(
    name: str, served: str, max_num_seqs: int, kv_capacity_tokens: int
) -> None:
    """Simulate 300 ShareGPT requests at 10/s that vLLM 0.19 served on that GPU, with `fcfs`.

    One of the two runs is heavily overloaded, so that steps too long by a few per cent would show
    in TTFT.
    """
    lines = (PERF / "vllm_runs" / served / "requests.jsonl").read_text().splitlines()
    real = sorted(map(json.loads, lines), key=lambda r: float(r["queued_ts"]))
    trace = Trace.of(
        [
            TraceRequest(r["request_id"], r["queued_ts"], r["input_toks"], r["output_toks"])
            for r in real
        ],
        "ShareGPT, as served",
    )
    limits = Limits(max_num_batched_tokens=2048, max_num_seqs=max_num_seqs)
    config = SimulationConfig(limits, num_blocks=kv_capacity_tokens // 16)
    simulated = simulate(trace, FCFS(), load_model(name), config)
    spans_s = [(r["last_token_ts"] - r["first_token_ts"], r["output_toks"]) for r in real]
    real_tpot_s = mean([span / (n - 1) for span, n in spans_s if n > 1])
    assert mean([tpot_s(r) for r in simulated if r.num_output_tokens > 1]) == pytest.approx(
        real_tpot_s, rel=0.05
    )
    real_ttft_s = mean([r["first_token_ts"] - r["queued_ts"] for r in real])
    assert mean([r.token_times_s[0] - r.arrival_s for r in simulated]) == pytest.approx(
        real_ttft_s, rel=0.15
    )


def tpot_s(request: Request) -> float:
    times = request.token_times_s
    return (times[-1] - times[0]) / (len(times) - 1)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_recorded_steps_of_a_real_server_are_what_the_cpu_model_says() -> None:
    """The model predicts 987 steps of SmolLM2 under live traffic, each before it learns from it."""
    steps = read_profile(ROOT / "profiling" / "cpu" / "traffic.csv").measurements
    model = OnlineModel(load_model("cpu/smollm2-135m"))
    errors, num_covered = [], 0
    for step in steps:
        errors.append(abs(model.predict(step.shape) / step.seconds - 1))
        num_covered += step.seconds <= model.predict_upper(step.shape)
        model.observe(step.shape, step.seconds)
    assert len(steps) > 900
    assert mean(errors) <= 0.08
    assert 0.985 <= num_covered / len(steps) <= 0.995
