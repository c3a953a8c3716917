"""Fits and bundles models of whole steps, composed from LLMServingSim's per-layer kernel times.

    python profiling/llmservingsim/compose.py <llmservingsim>/profiler/perf

One step of S requests and T tokens takes

    once(T) + layers × (dense(T) + attention(batch)) + lm_head(S) + sampler(S)

Every attention time is a measured row: one prefill chunk and a number of decodes of equal context,
in one kernel launch.  Only times that depend on T or S alone are interpolated between grid points.
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
    Part,
    Profile,
    fit,
    save_model,
    write_profile,
)
from slosched.perfmodel.memory import KV_CAPACITY_SHARE
from slosched.perfmodel.profiled_range import LARGEST_STEP_TOKENS
from slosched.perfmodel.split import covering

BUNDLED = Path(slosched.perfmodel.__file__).parent / "bundled"

_PER_STEP = ("embedding", "final_layernorm")
_TWICE_A_LAYER = ("layernorm",)
"""The table has one norm; a decoder layer runs it before attention and before the MLP."""
_NUM_KEPT = 320
"""Steps of a composed profile that the repository keeps, next to the layers' times."""
_REPEATS = 3
"""`measurement_iterations` in the tables' meta.yaml."""


_ESTIMATE = "our estimate: 0.9 of the memory less weights and activations"


@dataclass(frozen=True)
class Source:
    """One profiled GPU and model, with facts that the tables do not contain."""

    name: str
    gpu: str
    model: str
    tables: str
    """Folder of its tables below `profiler/perf`."""
    num_layers: int
    num_sms: int
    num_query_heads: int
    """Heads of one GPU, as are the KV heads."""
    num_kv_heads: int
    kv_capacity_tokens: int
    kv_capacity_origin: str = _ESTIMATE


SOURCES = (
    Source(
        name="rtx4090/llama-3.1-8b",
        gpu="NVIDIA GeForce RTX 4090",
        model="meta-llama/Llama-3.1-8B",
        tables="RTX4090/meta-llama/Llama-3.1-8B/bf16/tp1",
        num_layers=32,
        num_sms=128,
        num_query_heads=32,
        num_kv_heads=8,
        kv_capacity_tokens=41_408,
        kv_capacity_origin="vLLM 0.19 at gpu_memory_utilization 0.9",
    ),
    Source(
        name="rtxpro6000/llama-3.1-8b",
        gpu="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        model="meta-llama/Llama-3.1-8B",
        tables="RTXPRO6000/meta-llama/Llama-3.1-8B/bf16/tp1",
        num_layers=32,
        num_sms=188,
        num_query_heads=32,
        num_kv_heads=8,
        kv_capacity_tokens=520_000,
    ),
    Source(
        name="rtxpro6000/qwen3-32b",
        gpu="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        model="Qwen/Qwen3-32B",
        tables="RTXPRO6000/Qwen/Qwen3-32B/bf16/tp1",
        num_layers=64,
        num_sms=188,
        num_query_heads=64,
        num_kv_heads=8,
        kv_capacity_tokens=80_000,
    ),
)


@dataclass(frozen=True)
class Tables:
    """Microseconds of everything but attention, by tokens and by requests of a step."""

    layers_us: pd.Series
    requests_us: pd.Series

    @staticmethod
    def read(source: Source, perf: Path) -> Tables:
        return Tables.of(*Tables.frames(source, perf), source.num_layers)

    @staticmethod
    def frames(source: Source, perf: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Return the microseconds of each operator, by tokens and by requests of a step.

        An operator is a column.
        """
        folder = perf / source.tables
        dense, per_sequence = (
            pd.read_csv(folder / name) for name in ("dense.csv", "per_sequence.csv")
        )
        return (
            dense.pivot(index="tokens", columns="layer", values="time_us"),
            per_sequence.pivot(index="sequences", columns="layer", values="time_us"),
        )

    @staticmethod
    def of(dense: pd.DataFrame, per_sequence: pd.DataFrame, num_layers: int) -> Tables:
        """Sum the operators' times of a model with `num_layers` layers."""
        per_layer_us = dense.drop(columns=list(_PER_STEP)).sum(axis=1)
        per_layer_us += dense[list(_TWICE_A_LAYER)].sum(axis=1)
        layers_us = dense[list(_PER_STEP)].sum(axis=1) + num_layers * per_layer_us
        return Tables(layers_us, per_sequence.sum(axis=1))

    def at(self, num_tokens: pd.Series, num_reqs: pd.Series) -> np.ndarray:
        layers_us = np.interp(num_tokens, self.layers_us.index, self.layers_us)
        return layers_us + np.interp(num_reqs, self.requests_us.index, self.requests_us)

    def holds(self, num_tokens: pd.Series, num_reqs: pd.Series) -> pd.Series:
        return (num_tokens <= self.layers_us.index.max()) & (
            num_reqs <= self.requests_us.index.max()
        )

    def measurements(self) -> list[Measurement]:
        """Return a measurement of each tabulated count: tokens of one request, and requests.

        The measurements of requests have one token for each request.
        """
        tokens = pd.Series(self.layers_us.index)
        requests = pd.Series([s for s in self.requests_us.index if s > 1])
        alone_us = self.at(tokens, tokens * 0 + 1)
        many_us = self.at(requests, requests)
        return [
            *(
                Measurement(((int(t), 0),), us / 1e6, repeats=_REPEATS, part=Part.LAYERS)
                for t, us in zip(tokens, alone_us, strict=True)
            ),
            *(
                Measurement(((1, 0),) * int(s), us / 1e6, repeats=_REPEATS, part=Part.LAYERS)
                for s, us in zip(requests, many_us, strict=True)
            ),
        ]


def compose(source: Source, perf: Path) -> Profile:
    """Compose the layers' times, and all measured batches that fit into the KV cache."""
    tables = Tables.read(source, perf)
    rows = pd.read_csv(perf / source.tables / "attention.csv")
    tokens = rows.prefill_chunk + rows.n_decode
    requests = rows.n_decode + (rows.prefill_chunk > 0)
    context = rows.prefill_chunk + rows.kv_prefill + rows.n_decode * (rows.kv_decode + 1)
    micros = tables.at(tokens, requests) + source.num_layers * rows.time_us
    kept = tables.holds(tokens, requests) & (context <= source.kv_capacity_tokens)
    steps = rows.assign(seconds=micros / 1e6)[kept]
    measured = (*tables.measurements(), *(_measurement(step) for step in steps.itertuples()))
    return Profile(measured, _provenance(source))


def compose_unequal(source: Source, perf: Path) -> Profile:
    """Compose what `compose` does, and steps of decodes alone whose contexts are unequal."""
    profile = compose(source, perf)
    alone = [m for m in compose_skewed(source, perf) if not m.shape.num_prefills]
    provenance = {
        **profile.provenance,
        "method": profile.provenance["method"]
        + "; decodes alone of unequal context, too (skew.csv)",
        "not_in_it": profile.provenance["not_in_it"].replace(
            "decodes of unequal context", "decodes of unequal context beside a chunk"
        ),
    }
    return Profile((*profile.measurements, *alone), provenance)


def compose_skewed(source: Source, perf: Path) -> list[Measurement]:
    """Compose steps with decodes of unequal context, from `skew.csv`.

    The bundled models are not fitted to them.

    The times in that file are sums over the repetitions, three times those of `attention.csv`.
    """
    tables = Tables.read(source, perf)
    rows = pd.read_csv(perf / source.tables / "skew.csv")
    tokens, requests = rows.pc + rows.n, rows.n + (rows.pc > 0)
    context = rows.pc + rows.kp + rows.nb * (rows.kv_big + 1) + (rows.n - rows.nb) * (rows.kvs + 1)
    micros = tables.at(tokens, requests) + source.num_layers * rows.t_skew_us / _REPEATS
    kept = tables.holds(tokens, requests) & (context <= source.kv_capacity_tokens)
    return [
        Measurement(
            (((int(r.pc), int(r.kp)),) if r.pc else ())
            + ((1, int(r.kv_big)),) * int(r.nb)
            + ((1, int(r.kvs)),) * int(r.n - r.nb),
            float(r.seconds),
            repeats=_REPEATS,
        )
        for r in rows.assign(seconds=micros / 1e6)[kept].itertuples()
    ]


def thinned(profile: Profile, num_steps: int) -> Profile:
    """Return all rows of the layers, and `num_steps` steps that cover the shapes of all."""
    layers = [m for m in profile.measurements if m.part is Part.LAYERS]
    steps = [m for m in profile.measurements if m.part is Part.STEP]
    chosen = [steps[i] for i in covering(steps, num_steps)]
    return Profile((*layers, *chosen), profile.provenance)


def _measurement(step: tuple[float, ...]) -> Measurement:
    """Convert (index, prefill_chunk, kv_prefill, n_decode, kv_decode, attention time, seconds)."""
    _, chunk, prior, num_decodes, decode_prior, _, seconds = step
    prefill = ((int(chunk), int(prior)),) if chunk else ()
    decodes = ((1, int(decode_prior)),) * int(num_decodes)
    return Measurement(prefill + decodes, float(seconds), repeats=_REPEATS)


def _provenance(source: Source) -> dict[str, str]:
    return {
        "gpu": source.gpu,
        "model": source.model,
        "engine": "vLLM 0.19.0, bfloat16, tensor parallel 1, kernels of enforce_eager",
        "origin": "measured kernels",
        "source": f"github.com/casys-kaist/LLMServingSim 5daddb21, profiler/perf/{source.tables}",
        "num_sms": str(source.num_sms),
        "num_query_heads": str(source.num_query_heads),
        "num_kv_heads": str(source.num_kv_heads),
        "licence": "MIT (Copyright (c) 2024 CASYS Lab at KAIST)",
        "method": "steps composed from per-layer CUDA kernel times by "
        "profiling/llmservingsim/compose.py; each attention time measured jointly over one chunk "
        "and decodes of equal context",
        "range": "up to 2048 tokens and 256 requests a step, contexts up to 16384 tokens",
        LARGEST_STEP_TOKENS: "2048",
        "not_in_it": "launch gaps, CUDA graphs, scheduling and sampling on the CPU; more than one "
        "prefill chunk a step; decodes of unequal context; KV swap",
        "kv_capacity_tokens": str(source.kv_capacity_tokens),
        "kv_capacity_origin": source.kv_capacity_origin,
        KV_CAPACITY_SHARE: "0.9",
    }


def main(
    perf: Annotated[Path, typer.Argument(help="LLMServingSim's folder profiler/perf")],
    out: Annotated[Path, typer.Option(help="where the models go")] = BUNDLED,
    steps: Annotated[Path | None, typer.Option(help="also write the composed steps here")] = None,
    only: Annotated[str, typer.Option(help="sources whose names contain it")] = "",
    unequal: Annotated[
        bool, typer.Option(help="also fit decodes alone of unequal context; bundled models do not")
    ] = False,
) -> None:
    """Compose, fit and save the model of every source."""
    for source in (source for source in SOURCES if only in source.name):
        profile = (compose_unequal if unequal else compose)(source, perf)
        if steps is not None:
            path = steps / f"{source.name}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            write_profile(thinned(profile, _NUM_KEPT), path)
        report: FitReport = fit(profile)
        path = out / f"{source.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        save_model(report.model, path)
        typer.echo(
            f"{source.name}: {report.model.form}, {report.train.count} steps fitted, errors of "
            "the others:"
        )
        for regime, error in {**report.by_regime, "all": report.held_out}.items():
            typer.echo(
                f"  {regime:>12} {error.count:5}  MAPE {error.mape:4.1f} %, p50 {error.p50:4.1f} %,"
                f" p90 {error.p90:4.1f} %, p99 {error.p99:4.1f} %"
            )


if __name__ == "__main__":
    typer.run(main)
