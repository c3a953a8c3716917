"""Many batch shapes at once: the sums of `BatchShape` as arrays, for fits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slosched.core import BatchShape

Array = NDArray[np.float64]


class Columns:
    """The sums of n shapes, each an array of n numbers under the name it has in `BatchShape`."""

    num_prefill_tokens: Array
    num_prefills: Array
    num_decodes: Array
    prefill_attention_tokens: Array
    squared_chunk_tokens: Array
    prefill_context_tokens: Array
    num_prefill_tiles: Array
    prefill_tile_tokens: Array
    decode_context_tokens: Array
    max_context_tokens: Array
    max_decode_context_tokens: Array
    num_draft_tokens: Array
    num_swapped_blocks: Array

    def __init__(self, shapes: Sequence[BatchShape]) -> None:
        for name in BatchShape.__slots__:
            values = np.array([getattr(shape, name) for shape in shapes], dtype=np.float64)
            setattr(self, name, values)
        self.num_tokens = self.num_prefill_tokens + self.num_decodes + self.num_draft_tokens
        self.num_reqs = self.num_prefills + self.num_decodes

    def __len__(self) -> int:
        return len(self.num_tokens)

    def matrix(self) -> Array:
        """Return the sums as an array of shape (n, number of sums), as most regressors want it."""
        return np.column_stack([getattr(self, name) for name in BatchShape.__slots__])
