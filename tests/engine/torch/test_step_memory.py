"""The largest step: what it holds, that it runs, and what it leaves for the KV cache."""

from __future__ import annotations

import pytest
import torch

from slosched.core import Limits
from slosched.engine.torch import KVSize, LargestStep, TorchExecutor, load_model, measured_kv_size
from slosched.engine.torch.step_memory import largest_step


def test_the_largest_step_uses_all_that_the_limits_and_the_cache_allow() -> None:
    largest = LargestStep(Limits(max_num_batched_tokens=64, max_num_seqs=8))
    batch = largest_step(largest, max_model_len=512, num_blocks=100, block_size=16)
    assert sum(chunk.num_new_tokens for chunk in batch.chunks) == 64
    assert len(batch.chunks) == 8
    assert all(chunk.emits_token for chunk in batch.chunks)
    contexts = [chunk.num_new_tokens + chunk.num_prior_tokens for chunk in batch.chunks]
    assert contexts == [512] + [(1600 - 512) // 7] * 7
    assert all(
        len(c.block_table) * 16 >= tokens for c, tokens in zip(batch.chunks, contexts, strict=True)
    )
    assert max(max(chunk.block_table) for chunk in batch.chunks) < 8


@pytest.mark.parametrize("limits", [Limits(1, 1), Limits(1, 8), Limits(8, 1), Limits(8, 8)])
def test_small_limits_have_a_largest_step(limits: Limits) -> None:
    batch = largest_step(LargestStep(limits, 3), max_model_len=4, num_blocks=1, block_size=2)
    assert 1 <= len(batch.chunks) <= limits.max_num_seqs
    assert sum(c.num_new_tokens for c in batch.chunks) <= limits.max_num_batched_tokens
    assert all(c.num_prior_tokens >= 0 and c.num_new_tokens >= 1 for c in batch.chunks)


@pytest.mark.parametrize("num_drafts", [0, 5])
def test_the_largest_step_runs(num_drafts: int) -> None:
    model = load_model("tiny-random", device="cpu", dtype="float32")
    largest = LargestStep(Limits(64, 4), num_drafts)
    batch = largest_step(largest, model.max_model_len, num_blocks=40, block_size=16)
    assert sum(chunk.num_new_tokens for chunk in batch.chunks) == 64
    assert [len(drafts) for drafts in batch.drafts.values()] == (
        [num_drafts] * 3 if num_drafts else []
    )
    result = TorchExecutor(model, num_blocks=6, block_size=16).execute(batch)
    assert len(result.token_ids) == 4
    assert not result.failed


def test_the_cache_of_a_cpu_is_what_is_stated() -> None:
    model = load_model("tiny-random", device="cpu", dtype="float32")
    size = measured_kv_size(model, LargestStep(Limits(64, 4)), 16)
    assert size.step_bytes is None
    assert 0 < size.kv_bytes <= 2 << 30
    assert size.num_blocks == size.kv_bytes // (model.geometry.bytes_per_token * 16)
    assert "no step was measured" in str(size)


def test_the_cache_of_a_gpu_is_what_the_step_leaves() -> None:
    size = KVSize.beside_step(30 << 20, 100 << 20, 1 << 20)
    assert (size.num_blocks, size.kv_bytes) == (70, 70 << 20)
    text = "largest step: 30 MiB at its peak, measured; left for the KV cache: 70 MiB"
    assert str(size) == text
    assert KVSize.beside_step(30, 20, 1).num_blocks == 0
    size = KVSize.beside_step(30 << 20, 100 << 20, 1 << 20, graph_bytes=20 << 20)
    assert size.num_blocks == 50
    assert "measured; CUDA graphs: 20 MiB; left for the KV cache: 50 MiB" in str(size)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="measuring needs a GPU; none is here")
def test_a_gpu_measures_its_largest_step() -> None:
    model = load_model("tiny-random", device="cuda")
    size = measured_kv_size(model, LargestStep(Limits(512, 16), 2, (1, 2, 4)), 16)
    assert size.step_bytes
    assert size.step_bytes > 16 * model.vocab_size * 2
