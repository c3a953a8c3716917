"""Batches that test a latency model in every regime, also far from the common case."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

import numpy as np

from slosched.perfmodel.measurement import Chunk

_MAX_CHUNKS = 4
_MIN_TOKENS = 16
_NUM_AXES = 4 + 2 * _MAX_CHUNKS
_REGIMES = (("decode", 0.25), ("single decode", 0.33), ("prefill", 0.48), ("mixed", 1.0))
"""Kinds of step, and where each kind ends on an axis from 0 to 1."""
_FRESH = 0.35
"""Share of the chunks that start a prompt."""


@dataclass(frozen=True)
class StressLimits:
    """The limits that the batches keep."""

    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 512
    max_context_tokens: int = 32_768
    kv_capacity_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = 1 if name == "max_num_seqs" else 2 * _MIN_TOKENS
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")


def stress_batches(limits: StressLimits, count: int, seed: int) -> list[tuple[Chunk, ...]]:
    """Draw `count` batches, spread evenly (a Latin hypercube) over the logarithm of every size.

    A batch has one to four chunks of 16 tokens up to the token budget, each after no prior context
    or up to the longest one, and 1 to `max_num_seqs` decodes, all with the same context of at least
    16 tokens. Some batches have chunks or decodes alone. What does not fit together is cut to size.
    """
    from scipy.stats import qmc  # half a second to import, which only a plan should pay

    if count < 1:
        raise ValueError(f"a plan needs at least one batch, not {count}")
    cube = qmc.LatinHypercube(d=_NUM_AXES, seed=np.random.default_rng(seed)).random(count)
    return [_batch(limits, point) for point in cube.tolist()]


def _batch(limits: StressLimits, point: list[float]) -> tuple[Chunk, ...]:
    """Build the batch at a point of the unit cube."""
    at, how_many, how_many_decodes, how_long, *chunk_axes = point
    regime = _REGIMES[bisect([end for _, end in _REGIMES], at)][0]
    decodes: tuple[Chunk, ...] = ()
    if regime != "prefill":
        most = min(limits.max_num_seqs, limits.max_num_batched_tokens) - (regime == "mixed")
        most = min(most, 1) if regime == "single decode" else most
        decodes = _decodes(limits, _log(how_many_decodes, 1, most) if most else 0, how_long)
    if "decode" in regime:
        return decodes
    num_chunks = min(1 + int(_MAX_CHUNKS * how_many**1.5), limits.max_num_seqs - len(decodes))
    axes = list(zip(chunk_axes[::2], chunk_axes[1::2], strict=True))[:num_chunks]
    return _chunks(limits, axes, decodes) + decodes


def _decodes(limits: StressLimits, count: int, how_long: float) -> tuple[Chunk, ...]:
    """Build decodes of equal context, as kernels are measured; keep a quarter of the cache free."""
    count = min(count, 3 * limits.kv_capacity_tokens // (4 * _MIN_TOKENS))
    if not count:
        return ()
    longest = min(limits.max_context_tokens, 3 * limits.kv_capacity_tokens // (4 * count))
    return ((1, _log(how_long, _MIN_TOKENS, longest) - 1),) * count


def _chunks(
    limits: StressLimits, axes: list[tuple[float, float]], decodes: tuple[Chunk, ...]
) -> tuple[Chunk, ...]:
    budget = limits.max_num_batched_tokens - len(decodes)
    free = limits.kv_capacity_tokens - sum(new + prior for new, prior in decodes)
    chunks: list[Chunk] = []
    for how_large, how_late in axes:
        most = min(budget, free, limits.max_context_tokens)
        if most < _MIN_TOKENS:
            break
        new = _log(how_large, _MIN_TOKENS, most)
        longest_prior = min(limits.max_context_tokens, free) - new
        late = (how_late - _FRESH) / (1 - _FRESH)
        prior = _log(late, 16, longest_prior) if late > 0 and longest_prior >= 16 else 0
        chunks.append((new, prior))
        budget -= new
        free -= new + prior
    return tuple(chunks)


def _log(share: float, low: int, high: int) -> int:
    """Interpolate between two sizes, evenly in the logarithm."""
    return round(low * math.exp(share * math.log(high / low)))
