"""FlashAttention 3, for Hopper GPUs, from `flash_attn_interface`.

It is built from the folder `hopper` of the flash-attention repository; PyPI has no usable release.
Its `flash_attn_with_kvcache` takes chunks and decodes in one call, and any block size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from slosched.engine.torch.attention.backend import (
    AttentionPlan,
    BackendUnavailableError,
    KernelLimits,
    compute_capability,
)
from slosched.engine.torch.attention.batch import PagedBatch
from slosched.engine.torch.attention.flash_plan import FLASH_DTYPES, FlashPlan

NAME = "flash-attn-3"
INSTALL = (
    "git clone https://github.com/Dao-AILab/flash-attention && "
    "pip install ./flash-attention/hopper --no-build-isolation"
)


def load(device: torch.device) -> FlashAttn3:
    """Return the backend, or raise BackendUnavailableError."""
    capability = compute_capability(device, NAME)
    if capability // 10 != 9:
        raise BackendUnavailableError(NAME, f"is for Hopper GPUs (9.0), not {capability / 10}")
    try:
        from flash_attn_interface import flash_attn_with_kvcache
    except ImportError as error:
        raise BackendUnavailableError(NAME, f"is not installed ({error}): {INSTALL}") from error
    return FlashAttn3(flash_attn_with_kvcache)


class FlashAttn3:
    """A backend of FlashAttention 3's `flash_attn_with_kvcache`."""

    name = NAME
    # vLLM's page on CUDA graphs names FlashAttention 3 as one that can be captured.
    limits = KernelLimits(
        1, FLASH_DTYPES, max_head_dim=256, head_dim_multiple=8, is_capturable=True
    )

    def __init__(self, with_kvcache: Callable[..., Any]) -> None:
        self._with_kvcache = with_kvcache

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        return FlashPlan(
            partial(
                self._with_kvcache,
                cache_seqlens=batch.context_lens,
                page_table=batch.block_tables,
                cu_seqlens_q=batch.query_starts,
                max_seqlen_q=batch.max_new_tokens,
            )
        )
