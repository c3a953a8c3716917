"""DecodeGraphs: steps of decodes alone, padded to a few sizes and replayed as CUDA graphs.

A decode is many short kernels, and launching them one by one takes the host longer than a GPU needs
to run them.  A graph launches all of them at once.  It always computes the same number of tokens
and reads the same addresses.  So a step is padded with idle decodes to the next size, and its input
is copied into buffers that never move.

On a CPU nothing is captured: the padded step is computed from the same buffers.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slosched.core import ScheduledBatch, ScheduledChunk
from slosched.engine.torch.attention import BackendUnavailableError, PagedBatch
from slosched.engine.torch.attention.batch import Int32s, Int64s
from slosched.engine.torch.capture import captured
from slosched.engine.torch.forward import forward
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.engine.torch.model import LoadedModel
from slosched.engine.torch.step_inputs import StepInput
from slosched.perfmodel.graphs import parse_graph_sizes, vllm_graph_sizes

AUTO = "auto"


def graph_sizes(text: str, model: LoadedModel, max_num_seqs: int) -> tuple[int, ...]:
    """Return the sizes that `auto`, or a text for `parse_graph_sizes`, means for this model.

    `auto` is what vLLM captures up to `max_num_seqs` if the model's attention can be captured on
    its device, and none otherwise.  Sizes that no step can need are left out.  Raises
    BackendUnavailableError if sizes are asked for that cannot be captured on this GPU.
    """
    is_gpu, backend = model.device.type == "cuda", model.backend
    if text == AUTO:
        if not (is_gpu and backend.limits.is_capturable):
            return ()
        return tuple(sorted({*vllm_graph_sizes(max_num_seqs), max_num_seqs}))
    sizes = parse_graph_sizes(text)
    if sizes and is_gpu and not backend.limits.is_capturable:
        raise BackendUnavailableError(
            backend.name,
            "is not known to run in CUDA graphs: give --graph-sizes none, or choose another "
            "--attention",
        )
    return sizes[: bisect_left(sizes, max_num_seqs) + 1]


class DecodeGraphs:
    """The decodes of a model in some sizes; without sizes, no step is padded."""

    def __init__(self, sizes: Sequence[int], model: LoadedModel, cache: PagedKVCache) -> None:
        """Capture a graph for each of the rising `sizes`, if the model is on a GPU.

        The last block of `cache` must belong to nobody: idle decodes write there.  Raises
        UnsupportedModelError if the model cannot be captured.
        """
        self._sizes = tuple(sizes)
        self._model = model
        self._cache = cache
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if not sizes:
            return
        self._num_tokens = min(model.max_model_len, cache.num_blocks * cache.block_size)
        self._input = _StaticInput(sizes[-1], self._num_tokens, cache)
        idle = self._input.idle(sizes[-1], 1)
        self._logits = forward(model.model, idle, cache, model.backend).clone()
        if model.device.type == "cuda":
            self._graphs = captured(
                self._sizes,
                lambda size: self._input.idle(size, self._num_tokens),
                self._compute,
                model,
            )

    def num_idle(self, batch: ScheduledBatch) -> int | None:
        """Return with how many idle decodes to pad a step; None if it is to run as it is."""
        if not self._sizes or batch.drafts or not all(map(_is_plain_decode, batch.chunks)):
            return None
        at = bisect_left(self._sizes, len(batch.chunks))
        return None if at == len(self._sizes) else self._sizes[at] - len(batch.chunks)

    @property
    def idle_block(self) -> int:
        """Return the block that idle decodes write to."""
        return self._cache.num_blocks - 1

    def run(self, step_input: StepInput) -> Tensor:
        """Return the logits of a step that is padded; the next run overwrites them."""
        size = len(step_input.token_ids)
        static = self._input.filled(step_input)
        if (graph := self._graphs.get(size)) is not None:
            graph.replay()
        else:
            self._compute(static)
        return self._logits[:size]

    def _compute(self, static: StepInput) -> None:
        model = self._model
        logits = forward(model.model, static, self._cache, model.backend)
        self._logits[: len(logits)].copy_(logits)


def _is_plain_decode(chunk: ScheduledChunk) -> bool:
    """Tell whether a chunk is a token that emits one, under the model's own weights."""
    return chunk.num_new_tokens == 1 and chunk.emits_token and chunk.request.lora_id is None


class _StaticInput:
    """The input of up to `most` decodes at addresses that never change; at first all are idle."""

    def __init__(self, most: int, num_tokens: int, cache: PagedKVCache) -> None:
        """Make room for contexts of up to `num_tokens`."""
        self._block_size, self._spare = cache.block_size, cache.num_blocks - 1
        width = -(-num_tokens // cache.block_size)
        with cache.device:
            self._token_ids = torch.zeros(most, dtype=torch.int64)
            self._positions = torch.zeros(most, dtype=torch.int64)
            self._slots = torch.full((most,), self._spare * cache.block_size)
            self._rows = torch.arange(most)
            self._query_starts = torch.arange(most + 1, dtype=torch.int32)
            self._context_starts = torch.arange(most + 1, dtype=torch.int32)
            self._context_lens = torch.ones(most, dtype=torch.int32)
            self._tables = torch.full((most, width), self._spare, dtype=torch.int32)

    def filled(self, step_input: StepInput) -> StepInput:
        """Copy the input of a step here and return it from here."""
        batch = step_input.batch
        size, width = batch.block_tables.shape
        self._token_ids[:size].copy_(step_input.token_ids)
        self._positions[:size].copy_(batch.positions)
        self._slots[:size].copy_(batch.slots)
        self._context_starts[: size + 1].copy_(batch.context_starts)
        self._context_lens[:size].copy_(batch.context_lens)
        self._tables[:size, :width].copy_(batch.block_tables)
        return self._views(size, batch.num_context_tokens, batch.host_block_tables)

    def idle(self, size: int, num_tokens: int) -> StepInput:
        """Return the input of `size` decodes, whose longest context kernels take for `num_tokens`.

        A kernel chooses by it how to divide its work, once and for all if it is captured.
        """
        tables = np.full((size, -(-num_tokens // self._block_size)), self._spare, np.int32)
        return self._views(size, np.full(size, num_tokens), tables)

    def _views(self, size: int, num_context_tokens: Int64s, host_tables: Int32s) -> StepInput:
        batch = PagedBatch(
            block_size=self._block_size,
            num_new_tokens=np.ones(size, np.int64),
            num_context_tokens=num_context_tokens,
            host_block_tables=host_tables,
            positions=self._positions[:size],
            slots=self._slots[:size],
            query_starts=self._query_starts[: size + 1],
            context_starts=self._context_starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=self._tables[:size],
        )
        return StepInput(self._token_ids[:size], self._rows[:size], batch)
