"""slosched's own Triton kernel: paged attention of chunks and decodes in one call.

A program of the kernel computes one tile: some consecutive new tokens of one sequence, for all
query heads that share one KV head. It goes through the sequence's keys in tiles, and keeps a
running maximum and sum (the online softmax of FlashAttention), so that no score leaves the chip.

A long context is not divided among programs. A small batch of decodes with long contexts therefore
leaves most of a GPU idle, and FlashAttention's kernels are faster there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from slosched.engine.torch.attention.backend import Scoring
from slosched.engine.torch.attention.batch import PagedBatch

_LOG2_E = 1.4426950408889634
_LEAST_DOT = 16
"""The least size of each dimension of a product of matrices in Triton."""


# Compiling anew for a count of 1 or a multiple of 16 would take longer than it saves.
@triton.jit(do_not_specialize=["num_sequences", "window", "table_stride"])
def _paged_attention(
    out,
    query,
    k_cache,
    v_cache,
    query_starts,
    context_lens,
    block_tables,
    num_sequences,
    scale,
    window,
    table_stride,
    query_stride_token,
    query_stride_head,
    out_stride_token,
    out_stride_head,
    cache_stride_token,
    cache_stride_head,
    block_size: tl.constexpr,
    group_size: tl.constexpr,
    head_dim: tl.constexpr,
    tile_dims: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_keys: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute one tile of `out`; axis 0 of the grid is the tile, axis 1 the KV head."""
    tile_queries: tl.constexpr = tile_rows // group_size
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)

    # Every sequence begins with a tile of its own. Sequence i has its first tile at or before
    # query_starts[i] // tile_queries + i, so a search over i finds the tile's sequence, and no
    # map from tiles to sequences has to be made on the host.
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // tile_queries + middle <= tile:
            low = middle
        else:
            high = middle
    sequence = low
    start = tl.load(query_starts + sequence)
    num_new = tl.load(query_starts + sequence + 1) - start
    first_query = (tile - (start // tile_queries + sequence)) * tile_queries
    if first_query >= num_new:
        return  # the tiles are counted generously, so some are empty

    # A row of the tile is one query head of one new token.
    row = tl.arange(0, tile_rows)
    row_query = first_query + row // group_size
    row_head = kv_head * group_size + row % group_size
    row_used = (row < tile_queries * group_size) & (row_query < num_new)
    dim = tl.arange(0, tile_dims)
    dim_used = dim < head_dim

    row_token = (start + row_query).to(tl.int64)
    query_place = row_token * query_stride_token + row_head * query_stride_head
    q = tl.load(
        query + query_place[:, None] + dim[None, :],
        mask=row_used[:, None] & dim_used[None, :],
        other=0.0,
    )

    num_context = tl.load(context_lens + sequence)
    num_prior = num_context - num_new
    row_position = num_prior + row_query
    table = block_tables + tl.cast(sequence, tl.int64) * table_stride

    # The keys that any row of the tile sees: none before the window of its first token, and none
    # after its last token.
    first_key = tl.maximum(num_prior + first_query - window + 1, 0)
    end_key = tl.minimum(num_prior + first_query + tile_queries, num_context)

    # Scores are kept in base 2, as GPUs have an instruction for 2^x.
    best = tl.full([tile_rows], float("-inf"), tl.float32)
    total = tl.zeros([tile_rows], tl.float32)
    summed = tl.zeros([tile_rows, tile_dims], tl.float32)
    for tile_start in range(first_key // tile_keys * tile_keys, end_key, tile_keys):
        position = tile_start + tl.arange(0, tile_keys)
        position_used = position < end_key
        block = tl.load(table + position // block_size, mask=position_used, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        place = slot * cache_stride_token + kv_head * cache_stride_head

        k = tl.load(
            k_cache + place[None, :] + dim[:, None],
            mask=position_used[None, :] & dim_used[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k, input_precision=precision) * scale
        distance = row_position[:, None] - position[None, :]
        seen = (distance >= 0) & (distance < window) & row_used[:, None]
        scores = tl.where(seen, scores, float("-inf"))

        new_best = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen no key yet has -inf as its best; -inf - -inf would be NaN.
        safe_best = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - safe_best[:, None])
        shrink = tl.exp2(best - safe_best)
        v = tl.load(
            v_cache + place[:, None] + dim[None, :],
            mask=position_used[:, None] & dim_used[None, :],
            other=0.0,
        )
        total = total * shrink + tl.sum(weights, 1)
        summed = summed * shrink[:, None] + tl.dot(
            weights.to(v.dtype), v, input_precision=precision
        )
        best = new_best

    # Rows that are not used have seen nothing, and are not stored.
    result = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    out_place = row_token * out_stride_token + row_head * out_stride_head
    tl.store(
        out + out_place[:, None] + dim[None, :],
        result.to(out.dtype.element_ty),
        mask=row_used[:, None] & dim_used[None, :],
    )


def paged_attention(
    batch: PagedBatch, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring
) -> Tensor:
    """Return the causal attention of every new token over its own context.

    Shapes are those of `AttentionPlan.attend`. Each KV head must serve the same number of query
    heads.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads = k_cache.shape[2]
    group_size = num_heads // num_kv_heads
    if query.stride(-1) != 1:
        query = query.contiguous()
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=query.dtype, device=query.device)
    longest = batch.max_context_tokens
    # Decodes fill a tile of the least size; chunks load their keys less often with larger tiles.
    # Numbers of four bytes need smaller ones, as a tile has to fit into 99 KiB of shared memory.
    is_wide = query.dtype.itemsize > 2
    fewest_rows = max(_LEAST_DOT, triton.next_power_of_2(group_size))
    chunk_rows = max(32 if is_wide else 64, fewest_rows)
    tile_rows = fewest_rows if batch.max_new_tokens == 1 else chunk_rows
    # In a captured step there are more on the device than the host knows: those without tokens.
    num_sequences = len(batch.context_lens)
    num_tiles = num_tokens // (tile_rows // group_size) + num_sequences
    _paged_attention[(num_tiles, num_kv_heads)](
        out,
        query,
        k_cache,
        v_cache,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        num_sequences,
        scoring.scale * _LOG2_E,
        longest if scoring.window is None else scoring.window,
        batch.block_tables.stride(0),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        # Keys and values are two halves of one tensor, so their strides are the same.
        k_cache.stride(1),
        k_cache.stride(2),
        block_size=batch.block_size,
        group_size=group_size,
        head_dim=head_dim,
        tile_dims=max(_LEAST_DOT, triton.next_power_of_2(head_dim)),
        tile_rows=tile_rows,
        tile_keys=32 if is_wide or head_dim > 128 else 64,
        # Tensor cores would round float32 to 10 bits.
        precision="ieee" if query.dtype == torch.float32 else "tf32",
    )
    return out
