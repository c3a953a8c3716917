"""PagedBatch: which tokens a forward pass computes, and where their contexts lie in the cache."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The new tokens of some sequences, one sequence after the other.

    If all layers of the model have a sliding window, the contexts here begin with the first block
    that a new token sees, and only `positions` count from the begin of the sequence.

    Tensors lie on the device and are what kernels take; arrays lie on the host and are what a
    backend plans with. Both are views of buffers that the next step fills anew.
    """

    block_size: int
    """Number of tokens in a KV block."""
    num_new_tokens: Int64s
    """Number of tokens to compute of each sequence, at least 1."""
    num_context_tokens: Int64s
    """Number of tokens of each sequence in the cache once the new ones are written."""
    host_block_tables: Int32s
    """The same as `block_tables`."""
    positions: Tensor
    """Position of each new token in its own sequence: int64 [tokens]."""
    slots: Tensor
    """Place of each new token in the cache, as block * block size + offset: int64 [tokens]."""
    query_starts: Tensor
    """Index of the first new token of each sequence, and at last their number: int32
    [sequences + 1]; `cu_seqlens_q` in the words of FlashAttention."""
    context_starts: Tensor
    """Sums of the context lengths before each sequence: int32 [sequences + 1]; `cu_seqlens_k`."""
    context_lens: Tensor
    """`num_context_tokens` as int32 [sequences]; `seqused_k` or `cache_seqlens`."""
    block_tables: Tensor
    """The blocks of each sequence in the order of its tokens: int32 [sequences, most blocks].

    Entries behind a sequence's last block name some block of the cache, which must not be read: it
    may hold what is not a number. The rest of its last block holds numbers.
    """

    @property
    def max_new_tokens(self) -> int:
        return int(self.num_new_tokens.max())

    @property
    def max_context_tokens(self) -> int:
        return int(self.num_context_tokens.max())
