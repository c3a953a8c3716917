"""The documented interfaces of attention kernels that need a GPU, as functions that run anywhere.

Each function has the parameters of the real one, in its order and with its defaults, refuses what
the documentation refuses, and computes what the documentation says, in float32. They were written
from the docstrings and checks of flash-attn 2.8.3, FlashAttention 3 (folder `hopper`), flash-attn-4
4.0.0b36, vLLM 0.33 and torch 2.13. A backend that passes with one of them builds the right
arguments; whether the real kernel does what its documentation says only a GPU can tell.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash-attn 2: `cu_seqlens_k` gives the context lengths, and a block holds 256 tokens."""
    assert block_table is not None
    _check_lengths(cu_seqlens_k, len(cu_seqlens_q))
    lengths = cu_seqlens_k.diff()
    _check_cache(k, v, block_multiple=256)
    return _attend(
        q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, causal, window_size,
        max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """flash-attn 2: `q` is [sequences, tokens of each, heads, dim], and so is the result."""
    assert cache_seqlens is not None
    assert block_table is not None
    num_sequences, num_each = q.shape[:2]
    starts = torch.arange(num_sequences + 1, dtype=torch.int32) * num_each
    _check_cache(k_cache, v_cache, block_multiple=256)
    out = _attend(
        q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, softmax_scale,
        causal, window_size, num_each, int(cache_seqlens.max()),
    )  # fmt: skip
    return out.view(q.shape)


def flash_attn_3_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """FlashAttention 3: with `cu_seqlens_q`, `q` is [tokens, heads, dim]; blocks of any size."""
    assert cache_seqlens is not None
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert max_seqlen_q is not None
    _check_cache(k_cache, v_cache, block_multiple=1)
    return _attend(
        q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, causal,
        window_size, max_seqlen_q, int(cache_seqlens.max()),
    )  # fmt: skip


def flash_attn_4_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> tuple[Tensor, None]:
    """FlashAttention 4: paging excludes `cu_seqlens_k`, and the result is a pair."""
    assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
    assert cu_seqlens_q is not None
    assert seqused_k is not None
    assert page_table is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    assert all(side is None or side >= 0 for side in window_size)
    left, right = (-1 if side is None else side for side in window_size)
    _check_cache(k, v, block_multiple=1)
    out = _attend(
        q, k, v, cu_seqlens_q, seqused_k, page_table, softmax_scale, causal, (left, right),
        max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    return out, None


def vllm_flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    scheduler_metadata: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    num_splits: int = 0,
    output_scale: Any = None,
    fa_version: int = 2,
    s_aux: Any = None,
) -> Tensor:
    """vLLM: with a block table the context lengths come as `seqused_k`; blocks of 16 tokens."""
    assert cu_seqlens_k is None
    assert seqused_k is not None
    assert block_table is not None
    assert fa_version in (2, 3, 4)
    window = (-1, -1) if window_size is None else (window_size[0], window_size[1])
    _check_cache(k, v, block_multiple=16)
    return _attend(
        q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, causal, window,
        max_seqlen_q, max_seqlen_k,
    )  # fmt: skip


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """torch: the right side of the window says whether attention is causal."""
    assert cu_seq_k is None
    assert seqused_k is not None
    assert block_table is not None
    assert enable_gqa or query.shape[1] == key.shape[2], "needs enable_gqa"
    _check_cache(key, value, block_multiple=1)
    return _attend(
        query, key, value, cu_seq_q, seqused_k, block_table, scale, False, window_size, max_q,
        max_k,
    )  # fmt: skip


def _check_lengths(lengths: Tensor, size: int) -> None:
    assert lengths.dtype == torch.int32
    assert lengths.shape == (size,)
    assert lengths.is_contiguous()


def _check_cache(k: Tensor, v: Tensor, block_multiple: int) -> None:
    assert k.shape == v.shape
    assert k.dim() == 4, "[blocks, block size, KV heads, head dim]"
    assert k.shape[1] % block_multiple == 0
    assert k.stride(-1) == v.stride(-1) == 1


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    lengths: Tensor,
    table: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    max_q: int,
    max_k: int,
) -> Tensor:
    """Return attention with masks that are aligned to the last query and the last key.

    Query i of n sees key j of m if i + m - n - left <= j <= i + m - n + right, where -1 is no limit
    and `causal` makes the right side 0.
    """
    num_sequences = len(starts) - 1
    _check_lengths(starts, num_sequences + 1)
    _check_lengths(lengths, num_sequences)
    assert table.dtype == torch.int32
    assert table.dim() == 2
    assert len(table) == num_sequences
    assert table.stride(-1) == 1
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dim() == 3
    assert q.stride(-1) == 1
    assert q.shape[1] % k.shape[2] == 0
    assert starts[0] == 0
    assert starts[-1] == len(q)
    assert max_q >= starts.diff().max(), "queries beyond max_seqlen_q are not computed"
    assert max_k >= lengths.max(), "keys beyond max_seqlen_k are not seen"
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    left, right = window[0], 0 if causal else window[1]
    out = torch.empty_like(q)
    for i in range(num_sequences):
        rows, num_keys = slice(int(starts[i]), int(starts[i + 1])), int(lengths[i])
        num_blocks = -(-num_keys // k.shape[1])
        keys, values = (c[table[i, :num_blocks]].flatten(0, 1)[:num_keys].float() for c in (k, v))
        group = q.shape[1] // k.shape[2]
        scores = scale * torch.einsum(
            "qhd,khd->hqk", q[rows].float(), keys.repeat_interleave(group, 1)
        )
        num_queries = rows.stop - rows.start
        last = torch.arange(num_queries)[:, None] + num_keys - num_queries
        key = torch.arange(num_keys)
        hidden = torch.zeros(num_queries, num_keys, dtype=torch.bool)
        if left >= 0:
            hidden |= key < last - left
        if right >= 0:
            hidden |= key > last + right
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1)).to(
            q.dtype
        )
    return out
