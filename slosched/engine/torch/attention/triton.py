"""slosched's own Triton kernel (`triton_kernel.py`), for GPUs without further packages."""

from __future__ import annotations

import os
from collections.abc import Callable

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

NAME = "triton"
INSTALL = "pip install 'slosched[triton]'"
_Kernel = Callable[[PagedBatch, Tensor, Tensor, Tensor, Scoring], Tensor]


def load(device: torch.device) -> TritonBackend:
    """Return the backend, or raise BackendUnavailableError."""
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise BackendUnavailableError(
            NAME,
            "needs an NVIDIA GPU; for tests, TRITON_INTERPRET=1 has a CPU interpret the kernel",
        )
    if device.type != "cpu" and (capability := compute_capability(device, NAME)) < 80:
        raise BackendUnavailableError(NAME, f"is for GPUs from 8.0 on, not {capability / 10}")
    try:
        from slosched.engine.torch.attention.triton_kernel import paged_attention
    except ImportError as error:
        raise BackendUnavailableError(NAME, f"is not installed ({error}): {INSTALL}") from error
    return TritonBackend(paged_attention)


class TritonBackend:
    """A backend of our own kernel, for any model and block size."""

    name = NAME
    # What differs between two steps of as many tokens is read on the device.
    limits = KernelLimits(is_capturable=True, captures_chunks=True)

    def __init__(self, kernel: _Kernel) -> None:
        self._kernel = kernel

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        return _Plan(self._kernel, batch)


class _Plan:
    def __init__(self, kernel: _Kernel, batch: PagedBatch) -> None:
        self._kernel = kernel
        self._batch = batch

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        return self._kernel(self._batch, query, k_cache, v_cache, scoring)
