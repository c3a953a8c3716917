"""captured: computations of rising sizes as CUDA graphs that share their memory.

Source: the page "CUDA Graphs" of PyTorch's notes on CUDA semantics.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slosched.engine.torch.forward import UnsupportedModelError
from slosched.engine.torch.model import LoadedModel
from slosched.engine.torch.step_inputs import StepInput

_WARM_UPS = 2
"""Runs before a capture, in which kernels are compiled and libraries allocate what they keep."""


def captured(
    sizes: Sequence[int],
    prepare: Callable[[int], StepInput],
    compute: Callable[[StepInput], None],
    model: LoadedModel,
) -> dict[int, torch.cuda.CUDAGraph]:
    """Return a graph of `compute` for each of the rising `sizes`, on the model's GPU.

    `prepare` returns the input of a size; what it writes is not part of the graph, which would
    otherwise write it at each replay.  The largest is captured first, so that the others find room
    in its memory.  Raises UnsupportedModelError if the model cannot be captured.
    """
    device, pool = model.device, torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)
    graphs = {}
    for size in reversed(sizes):
        graph, step_input = torch.cuda.CUDAGraph(), prepare(size)
        stream.wait_stream(torch.cuda.current_stream(device))
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    compute(step_input)
            with torch.cuda.graph(graph, pool=pool, stream=stream):
                compute(step_input)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"{model.name} cannot be captured as a CUDA graph of {size} tokens ({error}): "
                "give --graph-sizes none"
            ) from error
        graphs[size] = graph
    torch.cuda.current_stream(device).wait_stream(stream)
    return graphs
