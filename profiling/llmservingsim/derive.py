"""Derives a model that nobody measured from one that was measured on the same GPU.

    python profiling/llmservingsim/derive.py <llmservingsim>/profiler/perf

Every operator outside attention is scaled by its share of the roofline. A matrix product is scaled
by its weights, which determine both its bytes and its arithmetic; for any other operator the time
above its launch is scaled by its elements.  Attention is scaled in the terms of the joint kernel's
model: layers, bytes of KV cache, query heads.  The result is an estimate, and is labelled as one.
`check` says how far such estimates are off where both models are measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer
from compose import BUNDLED, SOURCES, Source, Tables, compose

from slosched.perfmodel import (
    FittedModel,
    LayeredModel,
    Part,
    load_model,
    save_model,
    with_derived_swap,
)
from slosched.perfmodel.attention import DecodeAttention, JointAttention
from slosched.perfmodel.errors import ErrorReport, predictions, report_errors
from slosched.perfmodel.forms import described
from slosched.perfmodel.memory import KV_CAPACITY_SHARE
from slosched.perfmodel.table import monotone_table


@dataclass(frozen=True)
class Architecture:
    """The sizes that a decoder's times depend on."""

    hidden: int
    intermediate: int
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    vocabulary: int
    head_dim: int = 128
    ties_embeddings: bool = False

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights in bfloat16, without norms."""
        sizes = self.sizes
        layer = sum(sizes[name] for name in ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"))
        embeddings = (1 if self.ties_embeddings else 2) * sizes["lm_head"]
        return 2 * (self.num_layers * layer + embeddings)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size that each operator's time grows with: weights, or elements a token."""
        queries = self.num_query_heads * self.head_dim
        keys = self.num_kv_heads * self.head_dim
        return {
            "qkv_proj": self.hidden * (queries + 2 * keys),
            "o_proj": queries * self.hidden,
            "gate_up_proj": 2 * self.hidden * self.intermediate,
            "down_proj": self.intermediate * self.hidden,
            "lm_head": self.hidden * self.vocabulary,
            "embedding": self.hidden,
            "layernorm": self.hidden,
            "final_layernorm": self.hidden,
            "rotary_emb": queries + keys,
            "act_fn": self.intermediate,
            "sampler": self.vocabulary,
        }


LLAMA_8B = Architecture(4096, 14336, 32, 32, 8, 128_256)
LLAMA_3B = Architecture(3072, 8192, 28, 24, 8, 128_256, ties_embeddings=True)
QWEN_32B = Architecture(5120, 25600, 64, 64, 8, 151_936)

NAME = "rtx4090/llama-3.2-3b"
_MEASURED, _CHECK_FROM, _CHECK_TO = SOURCES
_PRODUCTS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head")


def derive(source: Source, old: Architecture, new: Architecture, perf: Path) -> LayeredModel:
    """Derive `new` on the GPU of `source`, on which `old` was measured."""
    measured = load_model(source.name)
    assert isinstance(measured, LayeredModel)
    assert isinstance(measured.attention, JointAttention)
    dense, per_sequence = Tables.frames(source, perf)
    ratios = {name: new.sizes[name] / size for name, size in old.sizes.items()}
    tables = Tables.of(_scaled(dense, ratios), _scaled(per_sequence, ratios), new.num_layers)
    return LayeredModel(
        monotone_table(tables.layers_us.index, tables.layers_us / 1e6),
        monotone_table(tables.requests_us.index, tables.requests_us / 1e6),
        _attention(measured.attention, old, new),
    )


def _scaled(times_us: pd.DataFrame, ratios: dict[str, float]) -> pd.DataFrame:
    """Scale the operators' times, of one column each, by the ratio of their sizes."""
    launch_us = times_us.iloc[0].where(~times_us.columns.isin(_PRODUCTS), 0.0)
    return launch_us + (times_us - launch_us) * pd.Series(ratios)[times_us.columns]


def _attention(measured: JointAttention, old: Architecture, new: Architecture) -> JointAttention:
    layers = new.num_layers / old.num_layers
    heads = new.num_query_heads / old.num_query_heads
    kv = layers * new.num_kv_heads / old.num_kv_heads
    kernel, decode = measured.kernel, measured.decode
    return JointAttention(
        kernel=replace(
            kernel,
            tiles_per_wave=kernel.tiles_per_wave / heads,
            group_size=new.num_query_heads / new.num_kv_heads,
            launch_s=kernel.launch_s * layers,
            per_tile_token_s=kernel.per_tile_token_s * layers * heads,
            per_walked_token_s=kernel.per_walked_token_s * layers,
            per_grid_block_s=kernel.per_grid_block_s * layers * heads,
            per_streamed_token_s=kernel.per_streamed_token_s * kv,
            reread_tiles=kernel.reread_tiles / heads,
        ),
        decode=DecodeAttention(
            launch_s=decode.launch_s * layers,
            per_request_s=decode.per_request_s * layers,
            per_context_token_s=decode.per_context_token_s * kv,
            per_longest_context_token_s=decode.per_longest_context_token_s * kv,
        ),
    )


def check(perf: Path) -> ErrorReport:
    """Judge Qwen3-32B, derived from Llama-3.1-8B, on its measurements on the RTX PRO 6000."""
    model = derive(_CHECK_FROM, LLAMA_8B, QWEN_32B, perf)
    steps = [m for m in compose(_CHECK_TO, perf).measurements if m.part is Part.STEP]
    return report_errors(predictions(model, steps), steps)


def kv_capacity_tokens() -> int:
    """Return the estimated tokens of the KV cache.

    Its memory is the cache that vLLM left to the measured model, plus the difference in weights.
    """
    cache = _MEASURED.kv_capacity_tokens * LLAMA_8B.kv_bytes_per_token
    freed = LLAMA_8B.weight_bytes - LLAMA_3B.weight_bytes
    return (cache + freed) // LLAMA_3B.kv_bytes_per_token


def derived_model(perf: Path) -> FittedModel:
    """Return the derived model of Llama-3.2-3B on the RTX 4090, with its provenance."""
    error = check(perf)
    measured = dict(load_model(_MEASURED.name).provenance)
    del measured[KV_CAPACITY_SHARE]  # the estimate below is not one for a share of the memory
    provenance = {
        **measured,
        "model": "meta-llama/Llama-3.2-3B",
        "origin": "roofline estimate",
        "num_query_heads": str(LLAMA_3B.num_query_heads),
        "num_kv_heads": str(LLAMA_3B.num_kv_heads),
        "method": "NOT MEASURED: each operator of the Llama-3.1-8B measured on this GPU, scaled by "
        "its weights or elements, and the terms of its attention by layers and heads, by "
        "profiling/llmservingsim/derive.py; the errors given are those of the same derivation "
        "where it can be checked, from Llama-3.1-8B to Qwen3-32B on an RTX PRO 6000",
        "kv_capacity_tokens": str(kv_capacity_tokens()),
        "kv_capacity_origin": "our estimate: what vLLM left to Llama-3.1-8B, and the weights that "
        "are smaller",
    }
    summary = {
        "count": error.count,
        "fitted": 0,
        "mape": error.mape,
        "p99": error.p99,
        "under_p99": error.under_p99,
    }
    model = described(derive(_MEASURED, LLAMA_8B, LLAMA_3B, perf), provenance, summary)
    return with_derived_swap(model)


def main(
    perf: Annotated[Path, typer.Argument(help="LLMServingSim's folder profiler/perf")],
    out: Annotated[Path, typer.Option(help="where the model goes")] = BUNDLED,
) -> None:
    """Derive and save the model; `compose.py` must have made the measured models."""
    model = derived_model(perf)
    path = out / f"{NAME}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_model(model, path)
    typer.echo(f"{NAME}: not measured; where the derivation can be checked it errs by")
    error = check(perf)
    typer.echo(
        f"  MAPE {error.mape:.1f} %, p50 {error.p50:.1f} %, p90 {error.p90:.1f} %, "
        f"p99 {error.p99:.1f} %, bias {error.bias:+.1f} %"
    )


if __name__ == "__main__":
    typer.run(main)
