"""The tensors behind the block tables: a paged KV cache on the device and its swap space."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slosched.core import BlockCopy, DeviceCopy
from slosched.engine.torch.side_stream import SideStream
from slosched.engine.torch.transfers import uploaded


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

    On the device they are one tensor, [layers, 2, blocks, block size, KV heads, head dim], so that
    a layer's keys are contiguous for the kernels.  Attention multiplies the unused rest of a
    block by probability zero, and 0 * NaN is NaN: so blocks have to be cleared before a step begins
    them.  On the host the blocks come first, so that each of them is one contiguous copy.

    Swaps run beside the computation, on a stream of their own and in the order in which they are
    asked for.  Blocks that leave are first gathered elsewhere on the device, so that they may be
    overwritten at once; blocks that come are read only when they are there.

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
        host_shape = (num_host_blocks, geometry.num_layers, 2, block_size, heads, dim)
        self._blocks = torch.zeros(shape, dtype=geometry.dtype, device=self.device)
        self._host_blocks = torch.zeros(host_shape, dtype=geometry.dtype, pin_memory=on_device)
        self._swaps = SideStream(self.device)

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
            self._blocks.index_fill_(2, self._on_device(blocks), 0)

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Begin to copy blocks from the device to the host; see `hold_computation`."""
        if not copies:
            return
        on_device = self._on_device([copy.device_block for copy in copies])
        leaving = self._blocks.index_select(2, on_device).movedim(2, 0).contiguous()
        self._swaps.wait_for_computation()
        self._swaps.borrow(leaving)
        with self._swaps.current():
            for block, copy in zip(leaving, copies, strict=True):
                self._host_blocks[copy.host_block].copy_(block, non_blocking=True)

    def copy(self, copies: Sequence[DeviceCopy]) -> None:
        """Copy blocks on the device; all are read before any is written."""
        if copies:
            sources = self._on_device([copy.source for copy in copies])
            targets = self._on_device([copy.target for copy in copies])
            self._blocks.index_copy_(2, targets, self._blocks.index_select(2, sources))

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks from the host to the device.

        The copies begin at once, beside a step that still runs; the computation waits for them.
        """
        if not copies:
            return
        with self._swaps.current():
            shape = (len(copies), *self._host_blocks.shape[1:])
            coming = torch.empty(shape, dtype=self.dtype, device=self.device)
            for block, copy in zip(coming, copies, strict=True):
                block.copy_(self._host_blocks[copy.host_block], non_blocking=True)
        self._swaps.hold_computation()
        self._swaps.lend(coming)
        on_device = self._on_device([copy.device_block for copy in copies])
        self._blocks.index_copy_(2, on_device, coming.movedim(0, 2))

    def hold_computation(self) -> None:
        """Let the computation go on only when all swaps so far have ended."""
        self._swaps.hold_computation()

    def _on_device(self, blocks: Sequence[int]) -> Tensor:
        return uploaded(blocks, torch.int64, self.device)


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
