"""FlashAttention 2, from the package `flash-attn`.

A batch of decodes goes to `flash_attn_with_kvcache`, which divides long contexts among the
multiprocessors. Any other batch goes to `flash_attn_varlen_func`. Interfaces as of 2.8.3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slosched.engine.torch.attention.backend import (
    AttentionPlan,
    BackendUnavailableError,
    KernelLimits,
    compute_capability,
)
from slosched.engine.torch.attention.batch import PagedBatch
from slosched.engine.torch.attention.flash_plan import FLASH_DTYPES, FlashPlan

NAME = "flash-attn"
INSTALL = "pip install flash-attn --no-build-isolation"


def load(device: torch.device) -> FlashAttn:
    """Return the backend, or raise BackendUnavailableError."""
    if (capability := compute_capability(device, NAME)) < 80:
        raise BackendUnavailableError(NAME, f"is for GPUs from 8.0 on, not {capability / 10}")
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    except ImportError as error:
        raise BackendUnavailableError(NAME, f"is not installed ({error}): {INSTALL}") from error
    return FlashAttn(flash_attn_varlen_func, flash_attn_with_kvcache)


class FlashAttn:
    """A backend of the two functions of `flash-attn` that read a paged cache."""

    name = NAME
    # Its author says that `flash_attn_with_kvcache` can be captured, paged, too: issue 896 of its
    # repository.
    limits = KernelLimits(
        256, FLASH_DTYPES, max_head_dim=256, head_dim_multiple=8, is_capturable=True
    )

    def __init__(self, varlen: Callable[..., Any], with_kvcache: Callable[..., Any]) -> None:
        self._varlen = varlen
        self._with_kvcache = with_kvcache

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        if batch.max_new_tokens == 1:
            return FlashPlan(partial(self._decode, batch))
        return FlashPlan(
            partial(
                self._varlen,
                cu_seqlens_q=batch.query_starts,
                cu_seqlens_k=batch.context_starts,
                max_seqlen_q=batch.max_new_tokens,
                max_seqlen_k=batch.max_context_tokens,
                block_table=batch.block_tables,
            )
        )

    def _decode(
        self, batch: PagedBatch, query: Tensor, k_cache: Tensor, v_cache: Tensor, **layer: Any
    ) -> Tensor:
        out: Tensor = self._with_kvcache(
            query[:, None],  # [sequences, 1, query heads, head dim]
            k_cache,
            v_cache,
            cache_seqlens=batch.context_lens,
            block_table=batch.block_tables,
            **layer,
        )
        return out[:, 0]
