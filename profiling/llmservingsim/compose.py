"""Whole steps composed from LLMServingSim's per-layer kernel times, fitted and bundled.

    python profiling/llmservingsim/compose.py <llmservingsim>/profiler/perf

One step of S requests and T tokens takes

    once(T) + layers × (dense(T) + attention(batch)) + lm_head(S) + sampler(S)

Every attention time is a measured row of its own: one prefill chunk and a number of decodes of
equal context in one kernel launch.  Only the times that depend on T or S alone are read between
grid points.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer

import slosched.perfmodel
from slosched.perfmodel import (
    FitReport,
    Measurement,
    Profile,
    fit_linear,
    save_model,
    write_profile,
)

BUNDLED = Path(slosched.perfmodel.__file__).parent / "bundled"

_PER_STEP = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)
"""The table has one norm; a decoder layer runs it before attention and before the MLP."""
_REPEATS = 3
"""`measurement_iterations` in the tables' meta.yaml."""


_ESTIMATE = "our estimate: 0.9 of the memory less weights and activations"


@dataclass(frozen=True)
class Source:
    """One profiled GPU and model, and what the tables do not say about it."""

    name: str
    gpu: str
    model: str
    tables: str
    """Folder of its tables below `profiler/perf`."""
    num_layers: int
    kv_capacity_tokens: int
    kv_capacity_origin: str = _ESTIMATE


SOURCES = (
    Source(
        name="rtx4090/llama-3.1-8b",
        gpu="NVIDIA GeForce RTX 4090",
        model="meta-llama/Llama-3.1-8B",
        tables="RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1",
        num_layers=32,
        kv_capacity_tokens=41_408,
        kv_capacity_origin="vLLM 0.19 at gpu_memory_utilization 0.9",
    ),
    Source(
        name="rtxpro6000/llama-3.1-8b",
        gpu="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        model="meta-llama/Llama-3.1-8B",
        tables="RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1",
        num_layers=32,
        kv_capacity_tokens=520_000,
    ),
    Source(
        name="rtxpro6000/qwen3-32b",
        gpu="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        model="Qwen/Qwen3-32B",
        tables="RTXPRO6000/Qwen/Qwen3-32B/bf16/tp1",
        num_layers=64,
        kv_capacity_tokens=80_000,
    ),
)


def compose(source: Source, perf: Path) -> Profile:
    """The steps of all measured batches that fit into the GPU's KV cache."""
    folder = perf / source.tables
    dense = pd.read_csv(folder / "dense.csv").pivot(
        index="tokens", columns="layer", values="time_us"
    )
    per_sequence = pd.read_csv(folder / "per_sequence.csv").groupby("sequences").time_us.sum()
    once_us = dense[list(_PER_STEP)].sum(axis=1)
    layer_us = dense.drop(columns=list(_PER_STEP)).sum(axis=1)
    layer_us += dense[list(_TWICE_A_LAYER)].sum(axis=1)
    rows = pd.read_csv(folder / "attention.csv")
    tokens = rows.prefill_chunk + rows.n_decode
    sequences = rows.n_decode + (rows.prefill_chunk > 0)
    context = rows.prefill_chunk + rows.kv_prefill + rows.n_decode * (rows.kv_decode + 1)
    micros = (
        np.interp(tokens, once_us.index, once_us)
        + source.num_layers * (np.interp(tokens, layer_us.index, layer_us) + rows.time_us)
        + np.interp(sequences, per_sequence.index, per_sequence)
    )
    kept = (
        (tokens <= dense.index.max())
        & (sequences <= per_sequence.index.max())
        & (context <= source.kv_capacity_tokens)
    )
    steps = rows.assign(seconds=micros / 1e6)[kept]
    measurements = tuple(_measurement(step) for step in steps.itertuples())
    return Profile(measurements, _provenance(source))


def fit(source: Source, perf: Path) -> FitReport:
    return fit_steps(compose(source, perf))


def fit_steps(profile: Profile) -> FitReport:
    """Nearly all measured batches are mixed, nearly all steps of a server are decodes."""
    return fit_linear(profile, balance_regimes=True)


def _measurement(step: tuple[float, ...]) -> Measurement:
    """From (index, prefill_chunk, kv_prefill, n_decode, kv_decode, attention time, seconds)."""
    _, chunk, prior, num_decodes, decode_prior, _, seconds = step
    prefill = ((int(chunk), int(prior)),) if chunk else ()
    decodes = ((1, int(decode_prior)),) * int(num_decodes)
    return Measurement(prefill + decodes, float(seconds), repeats=_REPEATS)


def _provenance(source: Source) -> dict[str, str]:
    return {
        "gpu": source.gpu,
        "model": source.model,
        "engine": "vLLM 0.19.0, bfloat16, tensor parallel 1, kernels of enforce_eager",
        "source": f"github.com/casys-kaist/LLMServingSim 5daddb21, profiler/perf/{source.tables}",
        "licence": "MIT (Copyright (c) 2024 CASYS Lab at KAIST)",
        "method": "steps composed from per-layer CUDA kernel times by "
        "profiling/llmservingsim/compose.py; each attention time measured jointly over one chunk "
        "and decodes of equal context",
        "range": "up to 2048 tokens and 256 requests a step, contexts up to 16384 tokens",
        "not_in_it": "launch gaps, CUDA graphs, scheduling and sampling on the CPU; more than one "
        "prefill chunk a step; decodes of unequal context; KV swap, which costs nothing here",
        "kv_capacity_tokens": str(source.kv_capacity_tokens),
        "kv_capacity_origin": source.kv_capacity_origin,
    }


def main(
    perf: Annotated[Path, typer.Argument(help="LLMServingSim's folder profiler/perf")],
    out: Annotated[Path, typer.Option(help="where the models go")] = BUNDLED,
    steps: Annotated[Path | None, typer.Option(help="also write the composed steps here")] = None,
) -> None:
    """Compose, fit and save every source."""
    for source in SOURCES:
        profile = compose(source, perf)
        if steps is not None:
            write_profile(profile, steps / f"{source.name}.csv")
        report = fit_steps(profile)
        save_model(report.model, out / f"{source.name}.json")
        typer.echo(f"{source.name}: {report.train.count} steps fitted, errors of the others:")
        for regime, error in {**report.by_regime, "all": report.held_out}.items():
            typer.echo(
                f"  {regime:>8} {error.count:5}  MAPE {error.mape:4.1f} %, p50 {error.p50:4.1f} %, "
                f"p90 {error.p90:4.1f} %, p99 {error.p99:4.1f} %"
            )


if __name__ == "__main__":
    typer.run(main)
