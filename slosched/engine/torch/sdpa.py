"""Attention that gathers blocks and calls scaled_dot_product_attention; it runs everywhere.

Decodes of similar context length are padded into one call; every prefill chunk is a call of its
own.  Measured on a CPU, that is 1.3 to 15 times faster than one block-diagonal call, since no query
is multiplied with another sequence's keys.  Indices and masks are built once per forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slosched.engine.torch.attention import AttentionPlan, Scoring, TokenSpan
from slosched.engine.torch.kv_cache import PagedKVCache

_SHORTEST_BUCKET_TOKENS = 64
"""The context length below which padding costs less than another call."""


class SdpaBackend:
    """A backend of gathers and SDPA calls, for any device."""

    name = "sdpa"

    def plan(self, spans: Sequence[TokenSpan], cache: PagedKVCache) -> AttentionPlan:
        return _SdpaPlan(spans, cache)


class _SdpaPlan:
    """A forward pass as a list of SDPA calls."""

    def __init__(self, spans: Sequence[TokenSpan], cache: PagedKVCache) -> None:
        self._calls: list[_DecodeCall | _ChunkCall] = []
        buckets: dict[int, list[tuple[int, TokenSpan]]] = defaultdict(list)
        row = 0
        for span in spans:
            if span.num_new_tokens == 1:
                buckets[_bucket(span.num_context_tokens)].append((row, span))
            else:
                self._calls.append(_ChunkCall(row, span, cache))
            row += span.num_new_tokens
        self._calls += [_DecodeCall(members, cache) for members in buckets.values()]

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for call in self._calls:
            call.attend_into(out, query, k_cache, v_cache, scoring)
        return out


class _DecodeCall:
    """One padded SDPA call for decodes with contexts of similar length."""

    def __init__(self, members: Sequence[tuple[int, TokenSpan]], cache: PagedKVCache) -> None:
        device = cache.device
        lengths = [span.num_context_tokens for _, span in members]
        self._longest = max(lengths)
        self._shortest = min(lengths)
        num_blocks = -(-self._longest // cache.block_size)
        tables = [_padded(span.block_table, num_blocks) for _, span in members]
        self._rows = torch.tensor([row for row, _ in members], device=device)
        self._blocks = torch.tensor(tables, device=device)
        self._lengths = torch.tensor(lengths, device=device)
        self._masks: dict[int | None, Tensor | None] = {}

    def attend_into(
        self,
        out: Tensor,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scoring: Scoring,
    ) -> None:
        num_rows, num_kv_heads = len(self._rows), k_cache.shape[2]
        rows = query.index_select(0, self._rows)
        result = scaled_dot_product_attention(
            # The query heads of a KV head become its queries, so no key has to be repeated.
            rows.view(num_rows, num_kv_heads, -1, query.shape[-1]),
            _gather(k_cache, self._blocks, self._longest),
            _gather(v_cache, self._blocks, self._longest),
            attn_mask=self._mask(scoring.window, query.dtype),
            scale=scoring.scale,
        )
        out.index_copy_(0, self._rows, result.reshape(rows.shape))

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the mask [decodes, 1, 1, longest context], or None if decodes see all tokens."""
        if window not in self._masks:
            needed = self._shortest < self._longest or (window or self._longest) < self._longest
            self._masks[window] = self._make_mask(window, dtype) if needed else None
        return self._masks[window]

    def _make_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        positions = torch.arange(self._longest, device=self._lengths.device)
        ends = self._lengths[:, None]
        seen = positions < ends
        if window is not None:
            seen &= positions >= ends - window
        return _additive(seen, dtype)[:, None, None, :]


class _ChunkCall:
    """The SDPA call of one prefill chunk over its own context."""

    def __init__(self, row: int, span: TokenSpan, cache: PagedKVCache) -> None:
        self._span = span
        self._rows = slice(row, row + span.num_new_tokens)
        num_blocks = -(-span.num_context_tokens // cache.block_size)
        self._blocks = torch.tensor([span.block_table[:num_blocks]], device=cache.device)
        self._masks: dict[int | None, Tensor | None] = {}

    def attend_into(
        self,
        out: Tensor,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scoring: Scoring,
    ) -> None:
        length = self._span.num_context_tokens
        mask = self._mask(scoring.window, query)
        result = scaled_dot_product_attention(
            query[self._rows].transpose(0, 1)[None],
            _gather(k_cache, self._blocks, length),
            _gather(v_cache, self._blocks, length),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scoring.scale,
            enable_gqa=query.shape[1] != k_cache.shape[2],
        )
        out[self._rows] = result[0].transpose(0, 1)

    def _mask(self, window: int | None, query: Tensor) -> Tensor | None:
        """Return the mask [new, prior + new], or None if SDPA's own causal mask is right."""
        if window not in self._masks:
            span = self._span
            plain = span.num_prior_tokens == 0 and (window or span.num_new_tokens) >= (
                span.num_new_tokens
            )
            self._masks[window] = None if plain else self._make_mask(window, query)
        return self._masks[window]

    def _make_mask(self, window: int | None, query: Tensor) -> Tensor:
        span = self._span
        keys = torch.arange(span.num_context_tokens, device=query.device)
        queries = keys[span.num_prior_tokens :, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return _additive(seen, query.dtype)


def _bucket(num_tokens: int) -> int:
    """Return the exponent of the smallest power of two that is at least `num_tokens`."""
    return max(num_tokens - 1, _SHORTEST_BUCKET_TOKENS - 1).bit_length()


def _padded(block_table: Sequence[int], num_blocks: int) -> list[int]:
    """Return `num_blocks` entries, padded with the last block, whose tokens the mask hides.

    No request reads another's blocks: if those hold NaN, a mask does not keep it out.
    """
    table = list(block_table[:num_blocks])
    return table + table[-1:] * (num_blocks - len(table))


def _gather(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """Return `length` tokens for each row of `blocks`: [rows, KV heads, length, head dim]."""
    num_rows = blocks.shape[0]
    gathered = cache.index_select(0, blocks.flatten())
    tokens = gathered.view(num_rows, -1, *cache.shape[2:])
    return tokens[:, :length].transpose(1, 2)


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to the scores; SDPA would convert a boolean one again in every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, float("-inf")
    )
