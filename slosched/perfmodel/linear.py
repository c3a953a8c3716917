"""The linear formula: the time of a step as a weighted sum of what is in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from slosched.core import BatchShape
from slosched.perfmodel.model import FittedModel

TILE_TOKENS = 64
"""Rows of a GEMM tile; a step's time jumps up whenever its tokens need another tile."""


class AttentionWork(StrEnum):
    """The definition of t2, the attention work of the prefill chunks."""

    EXACT = "exact"
    """Σ chunk · (prior + (chunk + 1) / 2): every (query, key) pair, right for chunked prefill."""
    LITERAL = "literal"
    """Σ chunk²: as the formula was first published; blind to the context that a chunk continues."""


@dataclass(frozen=True)
class LinearCoefficients:
    """C1 … C7, all in seconds per unit and never negative."""

    per_token_s: float
    """C1, for each of the t + Bd tokens."""
    per_attention_s: float
    """C2, for each unit of t2."""
    per_context_s: float
    """C3, for each token of the decodes' contexts, t3."""
    per_tile_s: float
    """C4, for each started tile of 64 tokens."""
    any_decode_s: float
    """C5, once if the batch has a decode."""
    per_swapped_block_s: float
    """C6, for each KV block copied between device and host (num_swap)."""
    constant_s: float
    """C7."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < math.inf:
                raise ValueError(
                    f"coefficient {name} must be finite and not negative, but is {value!r}"
                )


@dataclass(eq=False)
class LinearModel(FittedModel):
    """T = C1(t+Bd) + C2·t2 + C3·t3 + C4·ceil((t+Bd)/64) + C5·[Bd>0] + C6·num_swap + C7.

    t is the tokens of the prefill chunks, Bd the number of decodes, and t3 the sum of their
    contexts. t2 is the exact work of chunked prefill unless `attention` says "literal". `num_swap`
    counts KV blocks, since the time of a copy grows with them. Source: the blog post "vllm reading"
    (2025-04-01).
    """

    coefficients: LinearCoefficients
    attention: AttentionWork = AttentionWork.EXACT

    def __post_init__(self) -> None:
        super().__post_init__()
        c = self.coefficients
        self._c1 = c.per_token_s
        self._c2 = c.per_attention_s
        self._c3 = c.per_context_s
        self._c4 = c.per_tile_s
        self._c5 = c.any_decode_s
        self._c6 = c.per_swapped_block_s
        self._c7 = c.constant_s
        self._is_exact = self.attention is AttentionWork.EXACT

    @property
    def form(self) -> str:
        return "linear" if self._is_exact else "linear-literal"

    @property
    def swapped_block_s(self) -> float:
        return self.coefficients.per_swapped_block_s

    def predict(self, shape: BatchShape) -> float:
        tokens = shape.num_prefill_tokens + shape.num_decodes + shape.num_draft_tokens
        seconds = self._c6 * shape.num_swapped_blocks
        if tokens == 0:
            return seconds + self._c7 if shape.num_swapped_blocks else 0.0
        work = shape.prefill_attention_tokens if self._is_exact else shape.squared_chunk_tokens
        seconds += (
            self._c1 * tokens
            + self._c2 * work
            + self._c3 * shape.decode_context_tokens
            + self._c4 * ((tokens + TILE_TOKENS - 1) // TILE_TOKENS)
            + self._c7
        )
        return seconds + self._c5 if shape.num_decodes else seconds

    def parameters(self) -> dict[str, Any]:
        return {"attention": self.attention.value, "coefficients": asdict(self.coefficients)}


def linear_from(parameters: Mapping[str, Any], **described: Any) -> LinearModel:
    """Build the model that has these `LinearModel.parameters`.

    Raises KeyError or TypeError if they do not fit.
    """
    return LinearModel(
        LinearCoefficients(**parameters["coefficients"]),
        AttentionWork(parameters["attention"]),
        **described,
    )
