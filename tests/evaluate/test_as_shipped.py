"""Engines as they ship: their default settings by GPU and model."""

from __future__ import annotations

from dataclasses import fields

import pytest

from slosched.evaluate.as_shipped import ENGINES, AsShipped, UnknownEngineError, as_shipped
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.kv import PrefixCaching
from slosched.perfmodel import bundled_models, load_model
from slosched.perfmodel.memory import kv_memory
from slosched.policy.spec import make_policy


def shipped(engine: str, model_name: str) -> AsShipped:
    model = load_model(model_name)
    return as_shipped(engine, model, kv_capacity_tokens(model))


@pytest.mark.parametrize(
    ("model", "num_tokens", "num_seqs"),
    [
        ("b200/llama-3.1-8b", 16384, 1024),
        ("h200/llama-3.1-8b", 8192, 1024),
        ("h100/llama-3.1-8b", 8192, 1024),
        ("rtxpro6000/llama-3.1-8b", 8192, 1024),
        ("a100/llama-3.1-8b", 2048, 256),  # has as much memory as an H100
        ("l40s/llama-3.1-8b", 2048, 256),
        ("rtx4090/llama-3.1-8b", 2048, 256),
        ("cpu/smollm2-135m", 2048, 256),  # no GPU that is known
    ],
)
def test_vllm_chooses_tokens_and_requests_by_gpu(
    model: str, num_tokens: int, num_seqs: int
) -> None:
    vllm = shipped("vllm", model)
    assert (vllm.max_num_batched_tokens, vllm.max_num_seqs) == (num_tokens, num_seqs)
    assert (vllm.block_size, vllm.prefix_cache, vllm.overlap) == (16, PrefixCaching.HASH, True)


@pytest.mark.parametrize(
    ("model", "chunk", "num_seqs", "share"),
    [
        ("b200/llama-3.1-8b", 16384, 4096, 0.857),  # (183359 - 512 - 24576 - 1024 - 128) / 183359
        ("h200/llama-3.1-8b", 8192, 3596, 0.907),  # (143771 - 512 - 12288 - 512 - 128) / 143771
        ("h100/llama-3.1-8b", 8192, 2048, 0.835),  # (81559 - 512 - 12288 - 512 - 128) / 81559
        ("h100/llama-3.1-70b-tp4", 8192, 2048, 0.824),  # - 1024 - 512 for four GPUs
        ("l40s/llama-3.1-8b", 4096, 2048, 0.851),  # (46068 - 512 - 6144 - 64 - 128) / 46068
        ("rtx4090/llama-3.1-8b", 2048, 2048, 0.847),  # (24564 - 512 - 3072 - 48 - 128) / 24564
    ],
)
def test_sglang_chooses_chunk_requests_and_share_by_memory(
    model: str, chunk: int, num_seqs: int, share: float
) -> None:
    sglang = shipped("sglang", model)
    assert sglang.policy == f"sglang:chunked_prefill_size={chunk}"
    assert sglang.max_num_seqs == num_seqs
    assert sglang.max_num_batched_tokens == max(chunk, sglang.max_num_seqs)
    memory = kv_memory(load_model(model))
    assert memory is not None
    assert sglang.kv_tokens == memory.tokens_beside_weights(share)
    assert f"{share:g} of the memory" in sglang.kv_memory


def test_vllm_0_6_chunks_prompts_only_where_contexts_may_be_long() -> None:
    long = shipped("vllm-0.6", "h100/llama-3.1-8b")
    assert long.policy == "vllm_v0:enable_chunked_prefill=true"
    assert long.max_num_batched_tokens == 512
    short = shipped("vllm-0.6", "cpu/smollm2-135m")
    assert (short.policy, short.max_num_batched_tokens) == ("vllm_v0", 2048)
    assert not any((long.overlap, short.overlap))


def test_vllm_0_6_computes_whole_prompts_where_the_cache_holds_no_long_context() -> None:
    model = load_model("rtx4090/llama-3.2-3b")
    small = as_shipped("vllm-0.6", model, own_kv_tokens=20_000)
    assert (small.policy, small.max_num_batched_tokens) == ("vllm_v0", 20_000)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", bundled_models())
def test_every_engine_starts_on_every_bundled_device(engine: str, name: str) -> None:
    found = shipped(engine, name)
    make_policy(found.policy)
    assert all(getattr(found, field.name) is not None for field in fields(found))
    own = kv_capacity_tokens(load_model(name))
    # Where weights fill most of the memory, the room that vLLM keeps free is worth many tokens.
    most = 2.3 if own < 25_000 else 1.4
    assert 0.9 * own < found.kv_tokens < most * own


def test_where_the_memory_is_unknown_the_cache_is_the_latency_models_own() -> None:
    for engine in ENGINES:
        found = shipped(engine, "cpu/smollm2-135m")
        assert (found.kv_tokens, found.kv_memory) == (16384, "as of the latency model")


def test_an_unknown_engine_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UnknownEngineError, match=r"'sglan' \(did you mean sglang\?\)"):
        shipped("sglan", "h100/llama-3.1-8b")
