"""SideStream: copies between host and device beside the computation, ordered by events."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class SideStream:
    """A stream of its own for copies; on a CPU, where all happens at once, there is none.

    Streams of a GPU run beside each other, and what is asked for on one of them runs in order.  The
    computation is what is asked for on the stream that is current when a method is called.  Each of
    the two waits for the other only where it is told to, by events.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which copies, and new tensors, belong to this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def wait_for_computation(self) -> None:
        """Begin what is asked for here next when the computation so far has ended."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def hold_computation(self) -> None:
        """Go on with the computation when what was asked for here so far has ended."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def borrow(self, tensor: Tensor) -> None:
        """Give the memory of a tensor of the computation back only when the copies are done."""
        if self._stream is not None:
            tensor.record_stream(self._stream)

    def lend(self, tensor: Tensor) -> None:
        """Give the memory of a tensor of this stream back only when the computation is done."""
        if self._stream is not None:
            tensor.record_stream(torch.cuda.current_stream(self._stream.device))
