"""vLLM's build of FlashAttention 2, 3 and 4, from an installed vLLM.

Its kernels read blocks of any multiple of 16 tokens. Interface as of vLLM 0.26 to 0.33.
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

NAME = "vllm-flash-attn"
INSTALL = "pip install vllm"
_BEST_FIRST = {9: (3, 2), 10: (4, 2), 11: (4, 2)}
"""The versions of FlashAttention to try on a generation of GPUs; the others run version 2."""


def load(device: torch.device) -> VLLMFlashAttn:
    """Return the backend with the best version that runs here, or raise BackendUnavailableError."""
    capability = compute_capability(device, NAME)
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported
    except ImportError as error:
        raise BackendUnavailableError(NAME, f"is not installed ({error}): {INSTALL}") from error
    for version in _BEST_FIRST.get(capability // 10, (2,)):
        if is_fa_version_supported(version):
            return VLLMFlashAttn(flash_attn_varlen_func, version)
    raise BackendUnavailableError(
        NAME, f"has no kernel for GPUs of compute capability {capability / 10} in this vLLM"
    )


class VLLMFlashAttn:
    """A backend of vLLM's `flash_attn_varlen_func` in one of its versions."""

    def __init__(self, varlen: Callable[..., Any], fa_version: int) -> None:
        self._varlen = varlen
        self._fa_version = fa_version
        self.limits = KernelLimits(
            16,
            FLASH_DTYPES,
            max_head_dim=256,
            head_dim_multiple=8,
            # vLLM's page on CUDA graphs names these two versions.
            is_capturable=fa_version in (2, 3),
        )

    @property
    def name(self) -> str:
        return f"{NAME} (FA{self._fa_version})"

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        return FlashPlan(
            partial(
                self._varlen,
                max_seqlen_q=batch.max_new_tokens,
                cu_seqlens_q=batch.query_starts,
                max_seqlen_k=batch.max_context_tokens,
                seqused_k=batch.context_lens,
                block_table=batch.block_tables,
                fa_version=self._fa_version,
            )
        )
