"""The tensors behind the block tables: a paged KV cache on the device and its swap space."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slosched.core import BlockCopy, DeviceCopy


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of what one token stores in the cache: a key and a value in every layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class PagedKVCache:
    """Keys and values of `num_blocks` blocks on the device and `num_host_blocks` on the host.

    Each place has one tensor, [layers, 2, blocks, block size, KV heads, head dim], so that a
    layer's keys are contiguous for the kernels, and a swap is one indexed copy.  It starts as
    zeros: attention multiplies the unused rest of a block by probability zero, and 0 * NaN is NaN.

    Raises ValueError if the host memory is too small.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        device: torch.device | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1 or num_host_blocks < 0:
            raise ValueError(
                "a KV cache needs num_blocks >= 1, block_size >= 1 and num_host_blocks >= 0, not "
                f"{num_blocks}, {block_size} and {num_host_blocks}"
            )
        self.device = device or torch.device("cpu")
        self.block_size = block_size
        self.num_blocks = num_blocks
        on_device = self.device.type != "cpu"
        block_bytes = geometry.bytes_per_token * block_size
        _check_host_memory(block_bytes * (num_host_blocks + (0 if on_device else num_blocks)))
        heads, dim = geometry.num_kv_heads, geometry.head_dim
        shape = (geometry.num_layers, 2, num_blocks, block_size, heads, dim)
        host_shape = (geometry.num_layers, 2, num_host_blocks, block_size, heads, dim)
        self._blocks = torch.zeros(shape, dtype=geometry.dtype, device=self.device)
        self._host_blocks = torch.zeros(host_shape, dtype=geometry.dtype, pin_memory=on_device)

    @property
    def dtype(self) -> torch.dtype:
        return self._blocks.dtype

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one layer, each [blocks, block size, KV heads, head dim]."""
        keys, values = self._blocks[index]
        return keys, values

    def clear(self, blocks: Sequence[int]) -> None:
        """Overwrite blocks on the device with zeros."""
        if blocks:
            self._blocks.index_fill_(2, torch.tensor(blocks, device=self.device), 0)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks from the device to the host."""
        if copies:
            on_device, on_host = self._indices(copies)
            blocks = self._blocks.index_select(2, on_device)
            if self.device.type != "cpu":
                # Pageable memory would halve the transfer speed.
                pinned = torch.empty_like(blocks, device="cpu", pin_memory=True)
                blocks = pinned.copy_(blocks)
            self._host_blocks.index_copy_(2, on_host, blocks)

    def copy(self, copies: Sequence[DeviceCopy]) -> None:
        """Copy blocks on the device; all are read before any is written."""
        if copies:
            sources = torch.tensor([copy.source for copy in copies], device=self.device)
            targets = torch.tensor([copy.target for copy in copies], device=self.device)
            self._blocks.index_copy_(2, targets, self._blocks.index_select(2, sources))

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks from the host to the device."""
        if copies:
            on_device, on_host = self._indices(copies)
            blocks = self._host_blocks.index_select(2, on_host)
            if self.device.type != "cpu":
                blocks = blocks.pin_memory().to(self.device, non_blocking=True)
            self._blocks.index_copy_(2, on_device, blocks)

    def _indices(self, copies: Sequence[BlockCopy]) -> tuple[Tensor, Tensor]:
        on_device = torch.tensor([copy.device_block for copy in copies], device=self.device)
        return on_device, torch.tensor([copy.host_block for copy in copies])


def _check_host_memory(num_bytes: int) -> None:
    """Raise ValueError if the machine has less memory than `num_bytes`.

    Zeros are mapped only when touched, so the kernel would kill the process much later.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > total:
        raise ValueError(
            f"the KV cache would take {num_bytes / 2**30:.1f} GiB of host memory, the machine has "
            f"{total / 2**30:.1f} GiB: use fewer blocks"
        )
