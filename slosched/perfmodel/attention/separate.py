"""Backends with separate kernels for chunks and decodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from slosched.core import BatchShape
from slosched.perfmodel.attention.single import DecodeAttention, PrefillAttention
from slosched.perfmodel.columns import Array, Columns


@dataclass(frozen=True)
class SeparateAttention:
    """Separate kernels, whose times for chunks and for decodes add up.

    This holds for vLLM V0, FlashInfer and slosched's own engine. It also holds, by construction,
    for times that were composed from an operator profiler's tables.
    """

    kind: ClassVar[str] = "separate"
    prefill: PrefillAttention
    decode: DecodeAttention

    def asked(self) -> Callable[[BatchShape], float]:
        return self._seconds

    def _seconds(self, shape: BatchShape) -> float:
        seconds = self.prefill.seconds(shape) if shape.num_prefills else 0.0
        return seconds + self.decode.seconds(shape) if shape.num_decodes else seconds

    def column_seconds(self, c: Columns) -> Array:
        prefill_s = np.where(c.num_prefills > 0, self.prefill.column_seconds(c), 0.0)
        return prefill_s + np.where(c.num_decodes > 0, self.decode.column_seconds(c), 0.0)
