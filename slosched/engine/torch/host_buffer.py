"""HostBuffer: an array that the host fills and the device reads, the same in every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class HostBuffer:
    """A flat array in host memory, with its copy on the device.

    It is allocated once and grows when a step needs more, because allocating pinned memory takes
    longer than filling it. On a CPU both are the same memory. The device must have read the copy of
    one step before the next is filled, which holds since every step waits for its sampled tokens.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._allocate(1024)

    def _allocate(self, size: int) -> None:
        on_device = self._device.type != "cpu"
        self._host = torch.zeros(size, dtype=self._dtype, pin_memory=on_device)
        self._array: npt.NDArray[Any] = self._host.numpy()
        self._copy = (
            torch.zeros(size, dtype=self._dtype, device=self._device) if on_device else self._host
        )

    def array(self, size: int) -> npt.NDArray[Any]:
        """Return the first `size` entries, to be filled; what they hold is left from before."""
        if size > len(self._array):
            self._allocate(max(size, 2 * len(self._array)))
        return self._array[:size]

    def on_device(self, size: int) -> Tensor:
        """Return the first `size` entries on the device, as they are now on the host."""
        if self._copy is not self._host:
            self._copy[:size].copy_(self._host[:size], non_blocking=True)
        return self._copy[:size]


def split_array(array: npt.NDArray[Any], *sizes: int) -> list[npt.NDArray[Any]]:
    """Return consecutive parts of a flat array, of the given sizes."""
    return np.split(array, np.cumsum(sizes)[:-1])
