"""What `like vllm` sets is what the installed vLLM chooses on each GPU, by its own code."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from vllm.config import CacheConfig
from vllm.engine import arg_utils
from vllm.usage.usage_lib import UsageContext

from slosched.evaluate.as_shipped import as_shipped
from slosched.evaluate.comparison import kv_capacity_tokens
from slosched.kv import PrefixCaching
from slosched.perfmodel import bundled_models, load_model
from slosched.perfmodel.memory import MIB, gpu_memory_mib


@pytest.mark.parametrize("name", [name for name in bundled_models() if "cpu" not in name])
def test_tokens_and_requests_of_a_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(name)
    memory_mib, gpu = gpu_memory_mib(model.provenance), model.provenance["gpu"]
    assert memory_mib is not None
    platform = SimpleNamespace(
        get_device_total_memory=lambda: memory_mib * MIB,
        get_device_name=lambda: gpu,
        is_device_capability=lambda _: False,  # vLLM 0.33 asks whether it is a GB10
        is_tpu=lambda: False,
        is_cpu=lambda: False,
    )
    monkeypatch.setattr(arg_utils, "current_platform", platform)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(world_size=1)
    found = as_shipped("vllm", model, kv_capacity_tokens(model))
    server = UsageContext.OPENAI_API_SERVER
    assert found.max_num_batched_tokens == tokens[server]
    assert found.max_num_seqs == seqs[server]


def test_blocks_prefix_cache_and_share_of_the_memory() -> None:
    model, theirs = load_model("h100/llama-3.1-8b"), CacheConfig()
    found = as_shipped("vllm", model, kv_capacity_tokens(model))
    assert found.block_size == theirs.block_size
    assert (found.prefix_cache is PrefixCaching.HASH) == theirs.enable_prefix_caching
    assert found.kv_memory == f"{theirs.gpu_memory_utilization:g} of the memory"
