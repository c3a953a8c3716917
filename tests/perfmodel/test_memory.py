"""The memory of GPUs, and the tokens of KV cache in a share of it."""

from __future__ import annotations

import pytest

from slosched.perfmodel import bundled_models, load_model
from slosched.perfmodel.memory import KVMemory, gpu_memory_mib, kv_memory
from slosched.perfmodel.transformers import MODELS, known_transformer

KNOWN = [name for name in bundled_models() if kv_memory(load_model(name)) is not None]


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("Llama-3.1-8B", 8.030),
        ("Llama-3.1-70B", 70.554),
        ("Llama-3.2-3B", 3.213),
        ("Qwen3-8B", 8.191),
        ("Qwen3-32B", 32.762),
    ],
)
def test_weights_are_as_many_as_the_hub_says(model: str, billions: float) -> None:
    """The hub counts norms, too, which are less than a thousandth."""
    assert MODELS[model].weight_bytes == pytest.approx(2e9 * billions, rel=1e-3)


def test_most_bundled_devices_are_known() -> None:
    assert {name.partition("/")[0] for name in KNOWN} == {
        *("a100", "a30", "b200", "h100", "h200", "l4", "l40s", "rtx4090", "rtxpro6000")
    }


@pytest.mark.parametrize("name", KNOWN)
def test_at_the_share_of_the_provenance_the_capacity_is_that_of_the_provenance(name: str) -> None:
    model = load_model(name)
    memory = kv_memory(model)
    assert memory is not None
    assert memory.tokens_in_share(0.9) == int(model.provenance["kv_capacity_tokens"])
    assert memory.weight_bytes < memory.other_bytes, "it holds the weights, and more"


@pytest.mark.parametrize("name", ["cpu/smollm2-135m", "rtx4090/llama-3.2-3b"])
def test_a_capacity_of_another_share_or_device_says_nothing_of_the_memory(name: str) -> None:
    assert kv_memory(load_model(name)) is None


def test_weights_beside_a_bfloat16_cache_are_not_taken_for_bfloat16() -> None:
    facts = {"model": "Qwen/Qwen3-8B", "engine": "vLLM 0.24.0, bfloat16, tensor parallel 1"}
    assert known_transformer(facts) is MODELS["Qwen3-8B"]
    quantised = "vLLM 0.24.0, fp8 weights, bfloat16 KV cache, tensor parallel 1"
    assert known_transformer({**facts, "engine": quantised}) is None


def test_engines_count_a_share_in_three_ways() -> None:
    memory = KVMemory(total_bytes=1000.0, weight_bytes=300, other_bytes=400, bytes_per_token=10)
    assert memory.tokens_in_share(0.9) == 50  # (900 - 400) / 10
    assert memory.tokens_beside_weights(0.9) == 60  # (900 - 300) / 10
    assert memory.tokens_in_rest(0.9) == 54  # 0.9 · (1000 - 400) / 10
    assert memory.tokens_in_share(0.3) == 0


def test_a_gpu_is_found_by_a_part_of_its_name() -> None:
    assert gpu_memory_mib({"gpu": "NVIDIA GeForce RTX 4090"}) == 24564
    assert gpu_memory_mib({"gpu": "NVIDIA TITAN V"}) is None
    assert gpu_memory_mib({}) is None
