"""Attention that gathers blocks and calls scaled_dot_product_attention; it runs everywhere.

Decodes of similar context length are padded into one call, on a CPU into several if they are long.
Every prefill chunk is a call of its own.  Measured on a CPU, that is 1.3 to 15 times faster than
one block-diagonal call, since no query is multiplied with another sequence's keys.  Indices and
masks are built once per forward pass.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slosched.engine.torch.attention.backend import AttentionPlan, KernelLimits, Scoring
from slosched.engine.torch.attention.batch import PagedBatch

NAME = "sdpa"
_SHORTEST_BUCKET_TOKENS = 64
"""The context length below which padding costs less than another call."""
_MOST_TOKENS_A_CALL = 3072
"""The context tokens that a call for decodes copies on a CPU.  More do not stay in the processor's
cache until they are multiplied."""


def load(_device: torch.device) -> SdpaBackend:
    """Return the backend, which runs on every device."""
    return SdpaBackend()


class SdpaBackend:
    """A backend of gathers and SDPA calls, for any device, model and block size."""

    name = NAME
    limits = KernelLimits()

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        return _SdpaPlan(batch)


class _SdpaPlan:
    """A forward pass as a list of SDPA calls."""

    def __init__(self, batch: PagedBatch) -> None:
        self._calls: list[_DecodeCall | _ChunkCall] = []
        buckets: dict[int, list[int]] = defaultdict(list)
        contexts = batch.num_context_tokens.tolist()
        row = 0
        first_rows = []
        for sequence, num_new in enumerate(batch.num_new_tokens.tolist()):
            first_rows.append(row)
            if num_new == 1:
                buckets[_bucket(contexts[sequence])].append(sequence)
            else:
                self._calls.append(_ChunkCall(batch, sequence, row))
            row += num_new
        for bucket in buckets.values():
            for members in _groups(batch, bucket):
                self._calls.append(_DecodeCall(batch, members, [first_rows[m] for m in members]))

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for call in self._calls:
            call.attend_into(out, query, k_cache, v_cache, scoring)
        return out


class _DecodeCall:
    """One padded SDPA call for decodes with contexts of similar length."""

    def __init__(self, batch: PagedBatch, members: list[int], rows: list[int]) -> None:
        device = batch.positions.device
        lengths = batch.num_context_tokens[members]
        self._longest = int(lengths.max())
        self._shortest = int(lengths.min())
        self._contexts = _Contexts(batch, members, self._longest)
        self._rows = torch.tensor(rows, device=device)
        self._lengths = torch.from_numpy(lengths).to(device)
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
            self._contexts.read(k_cache),
            self._contexts.read(v_cache),
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

    def __init__(self, batch: PagedBatch, sequence: int, row: int) -> None:
        self._num_new = int(batch.num_new_tokens[sequence])
        self._num_context = int(batch.num_context_tokens[sequence])
        self._rows = slice(row, row + self._num_new)
        self._contexts = _Contexts(batch, [sequence], self._num_context)
        self._masks: dict[int | None, Tensor | None] = {}

    def attend_into(
        self,
        out: Tensor,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        scoring: Scoring,
    ) -> None:
        mask = self._mask(scoring.window, query)
        result = scaled_dot_product_attention(
            query[self._rows].transpose(0, 1)[None],
            self._contexts.read(k_cache),
            self._contexts.read(v_cache),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scoring.scale,
            enable_gqa=query.shape[1] != k_cache.shape[2],
        )
        out[self._rows] = result[0].transpose(0, 1)

    def _mask(self, window: int | None, query: Tensor) -> Tensor | None:
        """Return the mask [new, context], or None if SDPA's own causal mask is right."""
        if window not in self._masks:
            whole_prompt = self._num_new == self._num_context
            plain = whole_prompt and (window or self._num_new) >= self._num_new
            self._masks[window] = None if plain else self._make_mask(window, query)
        return self._masks[window]

    def _make_mask(self, window: int | None, query: Tensor) -> Tensor:
        keys = torch.arange(self._num_context, device=query.device)
        queries = keys[-self._num_new :, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        return _additive(seen, query.dtype)


class _Contexts:
    """The first tokens of some sequences' contexts, to be read from the cache of every layer."""

    def __init__(self, batch: PagedBatch, sequences: list[int], num_tokens: int) -> None:
        # A shorter context is padded with its own last block, whose tokens the mask hides: another
        # sequence's block may hold NaN, which no mask keeps out.
        last_places = (batch.num_context_tokens[sequences] - 1) // batch.block_size
        places = np.arange((num_tokens - 1) // batch.block_size + 1)
        tables = batch.host_block_tables[
            np.array(sequences)[:, None], np.minimum(places, last_places[:, None])
        ]
        self._num_tokens = num_tokens
        self._blocks = torch.from_numpy(tables).to(batch.positions.device)

    def read(self, cache: Tensor) -> Tensor:
        """Return [sequences, KV heads, tokens, head dim] of a layer's keys or values."""
        # Blocks that follow each other could be read in place, but SDPA then takes up to 1.4 times
        # as long as with a copy, which it finds in the processor's cache.
        blocks = cache.index_select(0, self._blocks.flatten())
        tokens = blocks.view(len(self._blocks), -1, *cache.shape[2:])
        return tokens[:, : self._num_tokens].transpose(1, 2)


def _bucket(num_tokens: int) -> int:
    """Return the exponent of the smallest power of two that is at least `num_tokens`."""
    return max(num_tokens - 1, _SHORTEST_BUCKET_TOKENS - 1).bit_length()


def _groups(batch: PagedBatch, bucket: list[int]) -> list[list[int]]:
    """Return the sequences of a bucket by calls, on a GPU in a single one."""
    longest = int(batch.num_context_tokens[bucket].max())
    on_cpu = batch.positions.device.type == "cpu"
    most = max(1, _MOST_TOKENS_A_CALL // longest) if on_cpu else len(bucket)
    return [bucket[start : start + most] for start in range(0, len(bucket), most)]


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask to add to the scores; SDPA would convert a boolean one again in every layer."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
        ~seen, float("-inf")
    )
