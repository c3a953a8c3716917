"""Values on their way between host and device, for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def uploaded(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the values as a tensor on the device, copied in the order of its computation.

    They go through pinned memory: from any other, the host would wait until the copy has begun.
    """
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


class Fetched:
    """A tensor that is being copied to the host; on a CPU it is there already."""

    def __init__(self, tensor: Tensor) -> None:
        self._host = tensor
        self._copied: torch.cuda.Event | None = None
        if tensor.device.type != "cpu":
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        """Return the tensor on the host, as it was when the copy was asked for."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
