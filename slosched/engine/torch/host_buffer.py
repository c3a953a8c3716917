"""HostBuffer: an array that the host fills and the device reads, the same in every other step."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from slosched.engine.torch.side_stream import SideStream


class HostBuffer:
    """A flat array in host memory, with its copy on the device.

    It is allocated once and grows when a step needs more, because allocating pinned memory takes
    longer than filling it. On a CPU both are the same memory.

    There are two of each, which are used by turns: while the device computes a step, it may read
    the copy of that step, and the next step is filled and copied already, on a stream of its own.
    Before a third is filled, the first must have ended.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, copies: SideStream) -> None:
        self._copies = copies
        self._sides = [_Side(1024, dtype, device) for _ in range(2)]

    def array(self, size: int) -> npt.NDArray[Any]:
        """Take the other array and return its first `size` entries, to be filled.

        What they hold is left from before.
        """
        self._sides.reverse()
        side = self._sides[0]
        if size > len(side.array):
            dtype, device = side.host.dtype, side.copy.device
            side = self._sides[0] = _Side(max(size, 2 * len(side.array)), dtype, device)
            self._copies.wait_for_computation()  # which may still use the memory just taken
        return side.array[:size]

    def on_device(self, size: int) -> Tensor:
        """Return the first `size` entries on the device, as they are now on the host.

        Between the copies and what reads them stands `SideStream.hold_computation`.
        """
        side = self._sides[0]
        if side.copy is not side.host:
            with self._copies.current():
                side.copy[:size].copy_(side.host[:size], non_blocking=True)
        return side.copy[:size]


class _Side:
    """An array in host memory, pinned if there is a GPU, and its copy."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        on_device = device.type != "cpu"
        self.host = torch.zeros(size, dtype=dtype, pin_memory=on_device)
        self.array: npt.NDArray[Any] = self.host.numpy()
        self.copy = torch.zeros(size, dtype=dtype, device=device) if on_device else self.host


def split_array(array: npt.NDArray[Any], *sizes: int) -> list[npt.NDArray[Any]]:
    """Return consecutive parts of a flat array, of the given sizes."""
    stops = [*accumulate(sizes)]
    return [array[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]
