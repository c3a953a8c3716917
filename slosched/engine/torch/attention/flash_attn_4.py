"""FlashAttention 4, for Hopper and Blackwell GPUs, from the package `flash-attn-4`.

It compiles its kernels when they are first used. Interface as of 4.0.0b36.
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

NAME = "flash-attn-4"
INSTALL = "pip install --pre 'flash-attn-4[cu13]'"
_PAGING = (9, 10, 11)
"""The generations of GPUs for which its kernels read a paged cache."""


def load(device: torch.device) -> FlashAttn4:
    """Return the backend, or raise BackendUnavailableError."""
    capability = compute_capability(device, NAME)
    if capability // 10 not in _PAGING:
        raise BackendUnavailableError(
            NAME, f"reads a paged cache on GPUs 9.x, 10.x and 11.x, not on {capability / 10}"
        )
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise BackendUnavailableError(NAME, f"is not installed ({error}): {INSTALL}") from error
    return FlashAttn4(flash_attn_varlen_func)


class FlashAttn4:
    """A backend of FlashAttention 4's `flash_attn_varlen_func`."""

    name = NAME
    limits = KernelLimits(1, FLASH_DTYPES, max_head_dim=256, head_dim_multiple=8)

    def __init__(self, varlen: Callable[..., Any]) -> None:
        self._varlen = varlen

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        kernel = partial(
            self._varlen,
            cu_seqlens_q=batch.query_starts,
            max_seqlen_q=batch.max_new_tokens,
            max_seqlen_k=batch.max_context_tokens,
            seqused_k=batch.context_lens,
            page_table=batch.block_tables,
        )
        return FlashPlan(kernel, unlimited=None)
