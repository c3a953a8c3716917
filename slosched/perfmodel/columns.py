"""Many batch shapes at once: the sums of `BatchShape` as arrays, for fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
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
        self._fill({n: np.array([getattr(s, n) for s in shapes]) for n in BatchShape.__slots__})

    @classmethod
    def of(cls, length: int, **sums: npt.ArrayLike) -> Columns:
        """Return the columns of `length` shapes with these sums; all others are 0."""
        columns = cls.__new__(cls)
        columns._fill({name: np.zeros(length) for name in BatchShape.__slots__})
        columns._fill(sums)
        return columns

    def _fill(self, sums: Mapping[str, npt.ArrayLike]) -> None:
        for name, values in sums.items():
            setattr(self, name, np.asarray(values, dtype=np.float64))
        self.num_tokens = self.num_prefill_tokens + self.num_decodes + self.num_draft_tokens
        self.num_reqs = self.num_prefills + self.num_decodes

    def __len__(self) -> int:
        return len(self.num_tokens)

    def matrix(self) -> Array:
        """Return the sums as an array of shape (n, number of sums), as most regressors want it."""
        return np.column_stack([getattr(self, name) for name in BatchShape.__slots__])
