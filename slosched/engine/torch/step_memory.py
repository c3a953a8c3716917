"""The size of the KV cache: on a GPU what the largest step leaves, measured by running it.

A KV cache of a fixed share of the free memory is too large where a step
needs much (long chunks, large vocabularies) and too small elsewhere.  vLLM, too, runs its largest
step before it allocates the cache.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slosched.core import (
    BatchShape,
    Limits,
    Request,
    SamplingParams,
    ScheduledBatch,
    ScheduledChunk,
    SchedulerOutput,
)
from slosched.engine.torch.executor import TorchExecutor
from slosched.engine.torch.model import LoadedModel

_GPU_SHARE = 0.9
"""The share of a GPU's memory that this process may use, as vLLM's --gpu-memory-utilization."""
_MOST_CPU_BYTES = 2 << 30
_SAMPLING = SamplingParams(
    temperature=1.0, top_k=1000, top_p=0.9, min_p=0.01, num_logprobs=1, num_prompt_logprobs=1
)
"""Sampling that does all there is to do with the logits, which takes the most memory."""


@dataclass(frozen=True, slots=True)
class LargestStep:
    """What decides how much memory a step can take."""

    limits: Limits
    num_draft_tokens: int = 0
    """The most draft tokens that a decode verifies."""
    graph_sizes: Sequence[int] = ()
    """The sizes of CUDA graphs, each of which keeps memory of its own."""
    mixed_graph_sizes: Sequence[int] = ()
    """The same of those of chunks and decodes."""


@dataclass(frozen=True, slots=True)
class KVSize:
    """The number of KV blocks that fit beside the largest step, and how it was found."""

    num_blocks: int
    step_bytes: int | None
    """What the largest step took at its peak; None on a CPU, where it is not measured."""
    kv_bytes: int
    graph_bytes: int = 0
    """What CUDA graphs keep."""

    def __str__(self) -> str:
        kv = f"KV cache: {_mib(self.kv_bytes)}"
        if self.step_bytes is None:
            return f"{kv} (a quarter of the available memory, at most 2 GiB; no step was measured)"
        graphs = f"; CUDA graphs: {_mib(self.graph_bytes)}" if self.graph_bytes else ""
        step = f"largest step: {_mib(self.step_bytes)} at its peak, measured"
        return f"{step}{graphs}; left for the {kv}"

    @classmethod
    def beside_step(
        cls, step_bytes: int, bytes_left: int, block_bytes: int, graph_bytes: int = 0
    ) -> KVSize:
        """Return the size where a step and CUDA graphs take so much of the `bytes_left`."""
        kv_bytes = max(0, bytes_left - step_bytes - graph_bytes)
        return cls(kv_bytes // block_bytes, step_bytes, kv_bytes, graph_bytes)


def measured_kv_size(
    model: LoadedModel, largest: LargestStep, block_size: int, *, seed: int = 0
) -> KVSize:
    """Return how many KV blocks fit on the model's device beside the largest step.

    On a GPU, that step is run and the CUDA graphs are captured; those of the server are captured
    again, since they contain the addresses of its KV cache.  Weights, step, graphs and KV cache
    together may take 90 % of the memory.  On a CPU nothing is run: the KV cache gets a quarter of
    what is available but at most 2 GiB, because such a machine usually does other work, too.
    Raises ValueError if not even one block fits.
    """
    block_bytes = model.geometry.bytes_per_token * block_size
    if model.device.type == "cuda":
        most_blocks = max(1, _gpu_bytes_left(model.device) // block_bytes)
        step_bytes = _step_bytes(model, largest, most_blocks, block_size, seed)
        graph_bytes = _graph_bytes(model, largest, block_size)
        bytes_left = _gpu_bytes_left(model.device)
        size = KVSize.beside_step(step_bytes, bytes_left, block_bytes, graph_bytes)
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        kv_bytes = min(available // 4, _MOST_CPU_BYTES)
        size = KVSize(kv_bytes // block_bytes, None, kv_bytes)
    if size.num_blocks < 1:
        raise ValueError(
            f"no KV block of {block_bytes} bytes fits ({size}): lower --max-num-batched-tokens or "
            "--max-num-seqs, or take a smaller model"
        )
    return size


def largest_step(
    largest: LargestStep, max_model_len: int, num_blocks: int, block_size: int
) -> ScheduledBatch:
    """Return a step with all tokens and all requests that the limits allow, each drawing a token.

    One request computes a chunk, the others decode, and verify as many draft tokens as the limits
    leave them.  Their contexts are as long as a KV cache of
    `num_blocks` blocks allows.  All block tables repeat the few blocks into which the step writes,
    so that it needs no more: what it computes is not used.
    """
    limits = largest.limits
    num_decodes = min(limits.max_num_seqs, limits.max_num_batched_tokens) - 1
    most_tokens = min(max_model_len, num_blocks * block_size)
    num_spare = limits.max_num_batched_tokens - 1 - num_decodes
    num_drafts = min(largest.num_draft_tokens, num_spare // max(1, num_decodes), most_tokens - 1)
    per_decode = 1 + num_drafts
    chunk = min(limits.max_num_batched_tokens - num_decodes * per_decode, most_tokens)
    rest = num_blocks * block_size - most_tokens
    context = min(most_tokens, max(per_decode, rest // max(1, num_decodes)))
    num_written = -(-max(chunk, per_decode) // block_size) + 1
    decode = per_decode, context - per_decode
    tokens = [(chunk, most_tokens - chunk), *[decode] * num_decodes]
    chunks, shape, drafts = [], BatchShape(), {}
    for place, (num_new, num_prior) in enumerate(tokens):
        length = num_new + num_prior
        request = Request(f"largest-step-{place}", 0.0, length, 1, sampling=_SAMPLING)
        table = [at % num_written for at in range(-(-length // block_size))]
        chunks.append(ScheduledChunk(request, num_new, num_prior, True, table))
        shape.add(num_new, num_prior)
        if place and num_drafts:
            drafts[request.request_id] = (0,) * num_drafts
    output = SchedulerOutput(draft_token_ids=drafts)
    return ScheduledBatch(tuple(chunks), (), (), shape, output)


def _gpu_bytes_left(device: torch.device) -> int:
    """Return the part of the memory that this process may use and that nobody uses."""
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(_GPU_SHARE * total) - (total - free)


def _step_bytes(
    model: LoadedModel, largest: LargestStep, num_blocks: int, block_size: int, seed: int
) -> int:
    """Run the largest step and return by how much torch's memory on the GPU grew at its peak."""
    batch = largest_step(largest, model.max_model_len, num_blocks, block_size)
    num_written = 1 + max(max(chunk.block_table) for chunk in batch.chunks)
    executor = TorchExecutor(model, num_blocks=num_written, block_size=block_size, seed=seed)
    before = torch.cuda.memory_allocated(model.device)
    torch.cuda.reset_peak_memory_stats(model.device)
    executor.execute(batch)
    return int(torch.cuda.max_memory_allocated(model.device)) - before


def _graph_bytes(model: LoadedModel, largest: LargestStep, block_size: int) -> int:
    """Capture all graphs over a small KV cache, and return what they take of the GPU.

    torch's own counters do not see what the driver keeps for a graph.
    """
    before = _gpu_bytes_left(model.device)
    executor = TorchExecutor(
        model,
        num_blocks=1,
        block_size=block_size,
        graph_sizes=largest.graph_sizes,
        mixed_graph_sizes=largest.mixed_graph_sizes,
        most_sequences=largest.limits.max_num_seqs,
    )
    taken = before - _gpu_bytes_left(model.device)
    del executor
    return taken if largest.graph_sizes else 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
