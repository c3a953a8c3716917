"""AdapterRows: which tokens of a step belong to which adapter, and what that adds to each layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from slosched.core import ScheduledChunk
from slosched.engine.torch.lora.adapter import Factors, LoraAdapter, Targets

_Part = tuple[Tensor, Factors]


class AdapterRows:
    """The tokens of one step, grouped by adapter; those of requests without one are in no group."""

    def __init__(self, chunks: Sequence[ScheduledChunk], device: torch.device) -> None:
        """Group the tokens of `chunks`, which lie one after the other.

        Raises ValueError for a request whose adapter is not loaded.
        """
        rows: dict[LoraAdapter, list[np.ndarray[tuple[int], np.dtype[np.int64]]]] = {}
        start = 0
        for chunk in chunks:
            stop = start + chunk.num_new_tokens
            if chunk.request.lora_id is not None:
                adapter = _adapter_of(chunk)
                rows.setdefault(adapter, []).append(np.arange(start, stop, dtype=np.int64))
            start = stop
        self._num_tokens = start
        self._rows = {
            adapter: torch.from_numpy(np.concatenate(spans)).to(device)
            for adapter, spans in rows.items()
        }

    @contextmanager
    def applied(self, targets: Targets) -> Iterator[None]:
        """Add to the outputs of the layers what the adapters add, until the end of the block.

        A layer gathers the rows of each adapter, and scatters what comes of them.
        """
        parts: dict[str, list[_Part]] = {}
        for adapter, rows in self._rows.items():
            for name, factors in adapter.factors.items():
                parts.setdefault(name, []).append((rows, factors))
        add = partial(_add, self._num_tokens)
        with ExitStack() as hooks:
            for name, layer_parts in parts.items():
                hook = targets[name].register_forward_hook(partial(add, layer_parts))
                hooks.callback(hook.remove)
            yield


def _adapter_of(chunk: ScheduledChunk) -> LoraAdapter:
    request = chunk.request
    if not isinstance(request.adapter, LoraAdapter):
        raise ValueError(
            f"request {request.request_id!r} asks for LoRA {request.lora_id!r}, but brings no "
            "adapter that was loaded for the torch engine"
        )
    return request.adapter


def _add(
    num_tokens: int, parts: list[_Part], layer: nn.Module, inputs: tuple[Tensor], output: Tensor
) -> None:
    """Add to `output` [1, tokens, outputs] what the adapters of some tokens add.

    Raises ValueError if the layer does not see all tokens of the step.
    """
    x, y = inputs[0].flatten(0, -2), output.view(-1, output.shape[-1])
    if len(x) != num_tokens:
        raise ValueError(
            f"{layer} sees {len(x)} of {num_tokens} tokens, so no adapter may change it"
        )
    for rows, (down, up) in parts:
        y.index_add_(0, rows, x.index_select(0, rows) @ down @ up)
