"""torch's own `varlen_attn`, where it reads a paged cache.

It has a `block_table` from torch 2.12 on. torch's built-in kernel, which is FlashAttention 2, does
not page: FlashAttention 3 (on Hopper) or 4 (on Blackwell) must be installed, and is activated here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slosched.engine.torch.attention.backend import (
    AttentionPlan,
    BackendUnavailableError,
    KernelLimits,
    Scoring,
    compute_capability,
)
from slosched.engine.torch.attention.batch import PagedBatch
from slosched.engine.torch.attention.flash_plan import FLASH_DTYPES

NAME = "torch-varlen"
INSTALL = "pip install 'torch>=2.12', and flash-attn-3 on Hopper or flash-attn-4 on Blackwell"
_PAGING = {9: "FA3", 10: "FA4"}
"""The implementation with which torch pages, by the generation of the GPU."""


def load(device: torch.device) -> TorchVarlen:
    """Return the backend, or raise BackendUnavailableError."""
    capability = compute_capability(device, NAME)
    implementation = _PAGING.get(capability // 10)
    if implementation is None:
        raise BackendUnavailableError(
            NAME, f"reads a paged cache on GPUs 9.x and 10.x, not on {capability / 10}"
        )
    needed = f"needs torch 2.12 or newer, not {torch.__version__}: {INSTALL}"
    try:
        from torch.nn.attention import activate_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        raise BackendUnavailableError(NAME, needed) from error
    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise BackendUnavailableError(NAME, needed)
    try:
        activate_flash_attention_impl(implementation)
    except (ImportError, RuntimeError, ValueError) as error:
        raise BackendUnavailableError(
            NAME, f"pages with {implementation} on this GPU, which is missing ({error}): {INSTALL}"
        ) from error
    return TorchVarlen(varlen_attn)


class TorchVarlen:
    """A backend of `torch.nn.attention.varlen.varlen_attn`."""

    name = NAME
    limits = KernelLimits(1, FLASH_DTYPES, max_head_dim=256, head_dim_multiple=8)

    def __init__(self, varlen: Callable[..., Any]) -> None:
        self._varlen = varlen

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        return _Plan(self._varlen, batch)


class _Plan:
    def __init__(self, varlen: Callable[..., Any], batch: PagedBatch) -> None:
        self._varlen = varlen
        self._batch = batch
        self._max_new_tokens = batch.max_new_tokens
        self._max_context_tokens = batch.max_context_tokens

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        # This interface has no `causal`: a window that ends at the token itself says it.
        left = -1 if scoring.window is None else scoring.window - 1
        out: Tensor = self._varlen(
            query,
            k_cache,
            v_cache,
            self._batch.query_starts,
            None,
            self._max_new_tokens,
            self._max_context_tokens,
            scale=scoring.scale,
            window_size=(left, 0),
            enable_gqa=query.shape[1] != k_cache.shape[2],
            seqused_k=self._batch.context_lens,
            block_table=self._batch.block_tables,
        )
        return out
