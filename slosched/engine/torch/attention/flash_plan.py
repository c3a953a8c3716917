"""The plan that the FlashAttention family shares: one call a layer, complete but for the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slosched.engine.torch.attention.backend import Scoring

FLASH_DTYPES = frozenset({torch.float16, torch.bfloat16})
"""The types in which all FlashAttention kernels compute."""


class FlashPlan:
    """A plan around a kernel that already has its batch, and lacks what differs between layers.

    `unlimited` is how the kernel's interface writes a side without a window.
    """

    def __init__(self, kernel: Callable[..., Any], *, unlimited: int | None = -1) -> None:
        self._kernel = kernel
        self._unlimited = unlimited

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        out = self._kernel(
            query,
            k_cache,
            v_cache,
            softmax_scale=scoring.scale,
            causal=True,
            window_size=flash_window(scoring.window, self._unlimited),
        )
        # FlashAttention 4 adds the log-sum-exp of the scores, asked for or not.
        result: Tensor = out[0] if isinstance(out, tuple) else out
        return result


def flash_window(
    window: int | None, unlimited: int | None = -1
) -> tuple[int, int] | tuple[int | None, int | None]:
    """Return how many tokens before and after itself a token sees, in FlashAttention's terms.

    Our `window` counts the token itself, FlashAttention's does not.
    """
    return (unlimited, unlimited) if window is None else (window - 1, 0)
