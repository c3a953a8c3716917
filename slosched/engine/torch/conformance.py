"""Random mixed batches over a paged cache, on which every attention backend must be exact."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from slosched.engine.torch.attention import AttentionBackend, PagedBatch, Scoring
from slosched.engine.torch.kv_cache import KVGeometry, PagedKVCache
from slosched.engine.torch.step_inputs import Spans, StepInputs

SCALE = 0.3
LARGEST_ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The largest distance from float32 attention, relative to its norm."""


@dataclass(frozen=True)
class Case:
    """A batch with queries, over a cache that is full of random keys and values."""

    batch: PagedBatch
    query: Tensor
    k_cache: Tensor
    v_cache: Tensor
    spans: Spans

    def expected(self, scoring: Scoring) -> Tensor:
        """Return the attention in float32, computed token by token from its definition."""
        out = torch.empty_like(self.query, dtype=torch.float32)
        keys, values = (c.flatten(0, 1).float() for c in (self.k_cache, self.v_cache))
        group = self.query.shape[1] // self.k_cache.shape[2]
        size, row = self.batch.block_size, 0
        for num_new, num_prior, table in zip(*self.spans, strict=True):
            for position in range(num_prior, num_prior + num_new):
                first = 0 if scoring.window is None else max(0, position + 1 - scoring.window)
                slots = [table[p // size] * size + p % size for p in range(first, position + 1)]
                k, v = (part[slots].repeat_interleave(group, dim=1) for part in (keys, values))
                scores = torch.einsum("hd,thd->ht", self.query[row].float(), k) * scoring.scale
                out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
                row += 1
        return out


@dataclass(frozen=True)
class Shape:
    """The sizes of a case: heads, dimensions, block size, and tokens as (new, prior) pairs."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    tokens: tuple[tuple[int, int], ...] = ((1, 40), (7, 0), (1, 0), (20, 13), (1, 17))


def make_case(
    shape: Shape, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Case:
    """Return a case with scattered blocks, in tables that are longer than they need to be."""
    rng = Random(seed)
    generator = torch.Generator().manual_seed(seed)
    size = shape.block_size
    held = [-(-(new + prior) // size) + rng.randint(0, 2) for new, prior in shape.tokens]
    blocks = rng.sample(range(sum(held) + 3), sum(held))
    spans = []
    for (new, prior), num_blocks in zip(shape.tokens, held, strict=True):
        spans.append((new, prior, blocks[:num_blocks]))
        blocks = blocks[num_blocks:]
    geometry = KVGeometry(2, shape.num_kv_heads, shape.head_dim, dtype)
    place = torch.device(device)
    cache = PagedKVCache(geometry, num_blocks=sum(held) + 3, block_size=size, device=place)
    k_cache, v_cache = cache.layer(1)
    # No sequence may be touched by what is in the blocks of others, or in those it has not begun.
    for part in (k_cache, v_cache):
        part.fill_(float("nan"))
        for new, prior, table in spans:
            for block in table[: -(-(new + prior) // size)]:
                part[block] = torch.randn(part[block].shape, generator=generator)
    num_tokens = sum(new for new, _ in shape.tokens)
    # transformers hands over queries that are transposed, so they are not contiguous.
    query = torch.randn(shape.num_heads, num_tokens, shape.head_dim, generator=generator)
    query = query.to(place, dtype).transpose(0, 1)
    ids = [0] * num_tokens
    batch = StepInputs(size, place).fill(range(len(spans)), Spans.of(spans), ids, []).batch
    return Case(batch, query, k_cache, v_cache, Spans.of(spans))


def relative_error(backend: AttentionBackend, case: Case, window: int | None) -> float:
    """Return the distance of a backend's attention from its definition, relative to its norm."""
    scoring = Scoring(SCALE, window)
    got = backend.plan(case.batch).attend(case.query, case.k_cache, case.v_cache, scoring)
    expected = case.expected(scoring)
    assert (got.shape, got.dtype) == (case.query.shape, case.query.dtype)
    return float((got.float() - expected).norm() / expected.norm())


MIXES = {
    "mixed": Shape(),
    "decodes": Shape(tokens=((1, 5), (1, 70), (1, 0), (1, 33), (1, 64), (1, 15))),
    "one decode": Shape(tokens=((1, 37),)),
    "one prompt": Shape(tokens=((75, 0),)),
    "a late chunk": Shape(tokens=((9, 90),)),
    "every head has its own": Shape(num_kv_heads=4),
    "one KV head": Shape(num_heads=6, num_kv_heads=1),
    "a group of three": Shape(num_heads=9, num_kv_heads=3, head_dim=24),
    "large blocks": Shape(block_size=256, tokens=((1, 300), (5, 250), (1, 0))),
}
"""Shapes that every backend must compute; all block sizes are multiples of 16."""

WINDOWS = (None, 1, 6, 1000)
"""Sliding windows, from a token that sees itself alone to one that sees everything."""
