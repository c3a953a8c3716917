"""captured: computations of rising sizes as CUDA graphs that share their memory.

Source: the page "CUDA Graphs" of PyTorch's notes on CUDA semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slosched.engine.torch.forward import UnsupportedModelError
from slosched.engine.torch.model import LoadedModel

_WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and libraries allocate what they keep."""


def captured(
    sizes: Sequence[int], compute: Callable[[int], None], model: LoadedModel
) -> dict[int, torch.cuda.CUDAGraph]:
    """Return a graph of `compute` for each of the rising `sizes`, on the model's GPU.

    The largest is captured first, so that the others find room in its memory.  Raises
    UnsupportedModelError if the model cannot be captured.
    """
    device, pool = model.device, torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    graphs = {}
    for size in reversed(sizes):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    compute(size)
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                compute(size)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"{model.name} cannot be captured as a CUDA graph of {size} tokens ({error}): "
                "give --graph-sizes none"
            ) from error
        graphs[size] = graph
    torch.cuda.current_stream(device).wait_stream(stream)
    return graphs
