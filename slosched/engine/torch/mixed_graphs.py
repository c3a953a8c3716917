"""MixedGraphs: steps of chunks and decodes, padded to a few numbers of tokens, as CUDA graphs.

A step that is not decodes alone launches as many kernels as one that is.  On an H100 the host takes
27 to 38 ms to launch those of Llama 3.1 8B, while the GPU runs 512 tokens in 17 ms.  So these steps
are captured, too, up to the size from which the GPU takes longer than the host.  When a model is
loaded, a padded step is compared with the same step as it is, and if they differ none is padded.

Padding belongs to no sequence: its keys and values go to the block that nobody has, and nothing
reads its results.  On a CPU nothing is captured, and the padded step is computed from the same
buffers.  vLLM's full CUDA graphs of mixed steps do the same (`cudagraph_mode` FULL).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slosched.core import ScheduledBatch
from slosched.engine.torch.attention import PagedBatch
from slosched.engine.torch.capture import captured
from slosched.engine.torch.forward import forward
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.engine.torch.model import LoadedModel
from slosched.engine.torch.step_inputs import Spans, StepInput, StepInputs

_SIZES = (*range(16, 256, 16), *range(256, 512, 32), *range(512, 1025, 64))
"""Numbers of tokens at most an eighth apart from 128 on.  Behind the last, an H100 takes longer
than its host does to launch the kernels."""
_PROVED_TOKENS = 7
"""The tokens of the step by which padding is proved when a model is loaded."""
_LARGEST_DISTANCE = 0.05
"""Between the logits of a padded step and a plain one, relative to their norm: rounding in
bfloat16 stays below it."""

logger = logging.getLogger(__name__)


def mixed_graph_sizes(decode_sizes: Sequence[int], model: LoadedModel) -> tuple[int, ...]:
    """Return the numbers of tokens to capture for a model whose decodes have these graphs.

    There are none without graphs of decodes, and where attention is not known to run in graphs of
    chunks.
    """
    is_possible = model.device.type == "cuda" and model.backend.limits.captures_chunks
    return _SIZES if decode_sizes and is_possible else ()


class MixedGraphs:
    """The steps of a model in some numbers of tokens; without sizes, no step is padded."""

    def __init__(
        self, sizes: Sequence[int], most_sequences: int, model: LoadedModel, cache: PagedKVCache
    ) -> None:
        """Capture a graph for each of the rising `sizes`, if the model is on a GPU.

        The last block of `cache` must belong to nobody.  Raises UnsupportedModelError if the model
        cannot be captured.
        """
        self._sizes = tuple(sizes)
        self._most_sequences = most_sequences
        self._model = model
        self._cache = cache
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if not sizes:
            return
        num_tokens = min(model.max_model_len, cache.num_blocks * cache.block_size)
        self._input = _StaticInput(sizes[-1], most_sequences, num_tokens, cache)
        self._logits = self._forward(self._input.idle(sizes[0])).clone()
        if model.device.type == "cuda":
            self._graphs = captured(self._sizes, self._input.idle, self._compute, model)
        if not self._is_right():
            logger.warning(
                "padded steps of chunks differ from plain ones with attention %s on this device: "
                "they run as they are",
                model.backend.name,
            )
            self._sizes, self._graphs = (), {}

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of tokens to which steps are padded, none if that proved wrong."""
        return self._sizes

    def size_for(self, batch: ScheduledBatch) -> int | None:
        """Return the number of tokens to which to pad a step; None if it is to run as it is."""
        if not self._sizes or batch.drafts or len(batch.chunks) > self._most_sequences:
            return None
        if any(chunk.request.lora_id is not None for chunk in batch.chunks):
            return None
        at = bisect_left(self._sizes, sum(chunk.num_new_tokens for chunk in batch.chunks))
        return None if at == len(self._sizes) else self._sizes[at]

    def run(self, step_input: StepInput, size: int) -> Tensor:
        """Return the logits of a step's emitting tokens; the next run overwrites them."""
        static = self._input.filled(step_input, size)
        if (graph := self._graphs.get(size)) is not None:
            graph.replay()
        elif self._model.backend.limits.captures_chunks:
            self._compute(self._input.as_captured(size))  # what a graph would replay
        else:
            self._compute(static)
        return self._logits[: len(step_input.emitting)]

    def _is_right(self) -> bool:
        """Tell whether a padded step of two chunks has the logits of the same step as it is.

        Its keys and values go to the first blocks of the cache, which are cleared again.  A cache
        that has no room for it is one to measure memory with, and serves nobody.
        """
        cache, size = self._cache, self._cache.block_size
        if cache.num_blocks < 4 or self._sizes[-1] < _PROVED_TOKENS or self._most_sequences < 2:
            return True
        spans = Spans.of([(3, 0, [0]), (_PROVED_TOKENS - 3, size, [1, 2])])
        ids = list(range(_PROVED_TOKENS))
        inputs = StepInputs(size, cache.device, self._model.window_tokens)
        step_input = inputs.fill(range(2), spans, ids, [2, _PROVED_TOKENS - 1])
        for part in cache.layer(0):
            part[1].copy_(torch.linspace(-1, 1, part[1].numel()).view_as(part[1]))
        plain = self._forward(step_input).float()
        at = bisect_left(self._sizes, _PROVED_TOKENS)
        padded = self.run(step_input, self._sizes[at]).float()
        cache.clear(range(3))
        return bool((padded - plain).norm() <= _LARGEST_DISTANCE * plain.norm())

    def _compute(self, static: StepInput) -> None:
        self._logits.copy_(self._forward(static))

    def _forward(self, static: StepInput) -> Tensor:
        return forward(self._model.model, static, self._cache, self._model.backend)


class _StaticInput:
    """The input of a step at addresses that never change; at first all of it is padding."""

    def __init__(
        self, most_tokens: int, most_sequences: int, num_tokens: int, cache: PagedKVCache
    ) -> None:
        """Make room for contexts of up to `num_tokens`."""
        self._num_tokens = num_tokens
        spare = cache.num_blocks - 1
        self._spare_slot = spare * cache.block_size
        width = -(-num_tokens // cache.block_size)
        with cache.device:
            self._token_ids = torch.zeros(most_tokens, dtype=torch.int64)
            self._emitting = torch.zeros(most_sequences, dtype=torch.int64)
            self._batch = PagedBatch(
                block_size=cache.block_size,
                num_new_tokens=np.zeros(0, np.int64),
                num_context_tokens=np.zeros(0, np.int64),
                host_block_tables=np.full((1, width), spare, np.int32),
                positions=torch.zeros(most_tokens, dtype=torch.int64),
                slots=torch.full((most_tokens,), self._spare_slot),
                query_starts=torch.zeros(most_sequences + 1, dtype=torch.int32),
                context_starts=torch.zeros(most_sequences + 1, dtype=torch.int32),
                context_lens=torch.zeros(most_sequences, dtype=torch.int32),
                block_tables=torch.full((most_sequences, width), spare, dtype=torch.int32),
            )

    def filled(self, step_input: StepInput, size: int) -> StepInput:
        """Copy the input of a step here, and return it with padding up to `size` tokens."""
        token_ids, emitting, batch = step_input
        static, num_tokens = self._batch, len(token_ids)
        num_sequences, width = batch.block_tables.shape
        self._token_ids[:num_tokens].copy_(token_ids)
        self._emitting[: len(emitting)].copy_(emitting)
        self._emitting[len(emitting) :].fill_(0)  # an older one may lie behind this step's tokens
        static.positions[:num_tokens].copy_(batch.positions)
        static.slots[:num_tokens].copy_(batch.slots)
        static.slots[num_tokens:size].fill_(self._spare_slot)
        # Sequences behind the last one begin where all tokens have ended, so they have none.
        static.query_starts[: num_sequences + 1].copy_(batch.query_starts)
        static.query_starts[num_sequences + 1 :].fill_(num_tokens)
        static.context_starts[: num_sequences + 1].copy_(batch.context_starts)
        static.context_lens[:num_sequences].copy_(batch.context_lens)
        static.block_tables[:num_sequences, :width].copy_(batch.block_tables)
        return self._padded(batch, size)

    def idle(self, size: int) -> StepInput:
        """Return the input of one prompt of `size` tokens, all in the block that nobody has."""
        self._batch.query_starts[1:].fill_(size)
        # A cache to measure memory with may hold less, and tables name no block behind its end.
        self._batch.context_lens.fill_(min(size, self._num_tokens))
        return self.as_captured(size)

    def as_captured(self, size: int) -> StepInput:
        """Return what is in the buffers, of which the host knows what it knows at a capture.

        That is a chunk of `size` tokens with the longest context, by which kernels choose how to
        divide their work, once and for all.
        """
        facts = replace(
            self._batch,
            num_new_tokens=np.array([size]),
            num_context_tokens=np.array([self._num_tokens]),
            host_block_tables=self._batch.host_block_tables,
        )
        return self._padded(facts, size)

    def _padded(self, facts: PagedBatch, size: int) -> StepInput:
        """Return the first `size` tokens of the buffers, with what `facts` tells the host."""
        padded = replace(
            self._batch,
            num_new_tokens=facts.num_new_tokens,
            num_context_tokens=facts.num_context_tokens,
            host_block_tables=facts.host_block_tables,
            positions=self._batch.positions[:size],
            slots=self._batch.slots[:size],
        )
        return StepInput(self._token_ids[:size], self._emitting, padded)
