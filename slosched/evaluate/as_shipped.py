"""Engines as they ship: the scheduler of each, under the settings that it chooses by itself.

Each function below returns what one engine does with a GPU if its user sets nothing.  The settings
that do not appear are those of the policies' own defaults, which are the engines'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from slosched.core import SloschedError
from slosched.kv import PrefixCaching
from slosched.perfmodel import FittedModel
from slosched.perfmodel.device import num_devices
from slosched.perfmodel.memory import KVMemory, gpu_memory_mib, kv_memory
from slosched.perfmodel.transformers import known_transformer
from slosched.spelling import meant

_GIB_MIB = 1024


class UnknownEngineError(SloschedError, ValueError):
    """There is no engine of this name."""


@dataclass(frozen=True)
class AsShipped:
    """An engine's scheduler and its default settings on one device."""

    engine: str
    """The engine with its version."""
    policy: str
    """The spec of the policy that reproduces its scheduler."""
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    prefix_cache: PrefixCaching
    overlap: bool
    kv_tokens: int
    kv_memory: str
    """The rule for the size of the KV cache, in words."""


@dataclass(frozen=True)
class Device:
    """What an engine finds when it starts: the GPU, the model, and the memory."""

    gpu: str
    """The GPU's name; empty if it is not known."""
    memory_mib: int | None
    """The memory of one GPU; None if it is not known."""
    num_devices: int
    max_context_tokens: int | None
    """The longest context that the model was made for; None if it is not known."""
    kv_memory: KVMemory | None
    own_kv_tokens: int
    """The KV cache's size if `kv_memory` is not known."""

    @classmethod
    def of(cls, model: FittedModel, own_kv_tokens: int) -> Device:
        """Return the device that a latency model was measured on."""
        transformer = known_transformer(model.provenance)
        return cls(
            gpu=model.provenance.get("gpu", ""),
            memory_mib=gpu_memory_mib(model.provenance),
            num_devices=num_devices(model),
            max_context_tokens=None if transformer is None else transformer.max_context_tokens,
            kv_memory=kv_memory(model),
            own_kv_tokens=own_kv_tokens,
        )

    def kv_cache(self, tokens_of: Callable[[KVMemory], int], rule: str) -> tuple[int, str]:
        """Return the KV cache's size by an engine's rule, and the rule in words.

        Where the memory is not known, it is the latency model's own size.
        """
        if self.kv_memory is None:
            return self.own_kv_tokens, "as of the latency model"
        return tokens_of(self.kv_memory), rule


def vllm(device: Device) -> AsShipped:
    """Return the defaults of `vllm serve`, 0.32 and 0.33.

    Sources: `EngineArgs.get_batch_defaults` in `engine/arg_utils.py` for the API server;
    `config/cache.py` (16 tokens a block, 0.92 of the memory, prefix caching); `config/vllm.py`
    (asynchronous scheduling, the default since 0.14.0).
    """
    memory_mib = device.memory_mib or 0
    if memory_mib >= 160 * _GIB_MIB:
        num_tokens, num_seqs = 16384, 1024
    elif memory_mib >= 70 * _GIB_MIB and "A100" not in device.gpu:
        num_tokens, num_seqs = 8192, 1024
    else:
        num_tokens, num_seqs = 2048, 256
    kv_tokens, rule = device.kv_cache(lambda m: m.tokens_in_share(0.92), "0.92 of the memory")
    return AsShipped(
        engine="vllm 0.33",
        policy="vllm_v1",
        max_num_batched_tokens=num_tokens,
        max_num_seqs=num_seqs,
        block_size=16,
        prefix_cache=PrefixCaching.HASH,
        overlap=True,
        kv_tokens=kv_tokens,
        kv_memory=rule,
    )


def vllm_0_6(device: Device) -> AsShipped:
    """Return the defaults of vLLM 0.6.3, whose scheduler is V0.

    It chunks prompts, 512 tokens a step, if the context may be longer than 32,768 tokens.  That is
    the model's longest context here, or what the KV cache holds if that is less: vLLM refuses to
    start with a longer one.  Otherwise a step holds whole prompts, as many tokens as the longest
    context and at least 2,048.

    Sources: `EngineArgs.create_engine_config` and its fields in `engine/arg_utils.py` (16 tokens a
    block, 256 requests, 0.9 of the memory, no prefix caching); `SchedulerConfig` in `config.py`
    (tokens a step); `raise_if_cache_size_invalid` in `worker/worker.py`.
    """
    kv_tokens, rule = device.kv_cache(lambda m: m.tokens_in_share(0.9), "0.9 of the memory")
    max_context_tokens = min(device.max_context_tokens or 0, kv_tokens)
    chunks = max_context_tokens > 32768
    return AsShipped(
        engine="vllm 0.6.3",
        policy="vllm_v0:enable_chunked_prefill=true" if chunks else "vllm_v0",
        max_num_batched_tokens=512 if chunks else max(max_context_tokens, 2048),
        max_num_seqs=256,
        block_size=16,
        prefix_cache=PrefixCaching.OFF,
        overlap=False,
        kv_tokens=kv_tokens,
        kv_memory=rule,
    )


def sglang(device: Device) -> AsShipped:
    """Return the defaults of SGLang 0.5.5.

    A step computes up to `chunked_prefill_size` prompt tokens, or a token for each running request,
    so the larger of both is the limit for its tokens.

    Sources: `ServerArgs._handle_gpu_memory_settings` in `srt/server_args.py` (chunk, CUDA graphs
    and share of the memory by the memory of a GPU; 1 token a page; overlap; radix cache), and
    `ModelRunner.init_memory_pool` in `srt/model_executor/model_runner.py` (requests).
    """
    chunk, share = _sglang_chunk_and_share(device)
    kv_tokens, rule = device.kv_cache(
        lambda m: m.tokens_beside_weights(share), f"{share:g} of the memory with the weights"
    )
    num_seqs = 4096
    if device.max_context_tokens is not None:
        num_seqs = min(max(512 * kv_tokens // device.max_context_tokens, 2048), 4096)
    num_seqs = max(1, min(num_seqs, kv_tokens // 2))
    return AsShipped(
        engine="sglang 0.5.5",
        policy=f"sglang:chunked_prefill_size={chunk}",
        max_num_batched_tokens=max(chunk, num_seqs),
        max_num_seqs=num_seqs,
        block_size=1,
        prefix_cache=PrefixCaching.RADIX,
        overlap=True,
        kv_tokens=kv_tokens,
        kv_memory=rule,
    )


def _sglang_chunk_and_share(device: Device) -> tuple[int, float]:
    """Return `chunked_prefill_size` and `mem_fraction_static`, which leaves room for activations.

    The room is counted in MiB: 1.5 for each token of a chunk, 2 for each request of a CUDA graph.
    """
    memory_mib, num_gpus = device.memory_mib, device.num_devices
    if memory_mib is None:
        return 4096, 0.88
    is_narrow = num_gpus < 4
    if memory_mib < 20 * _GIB_MIB:
        chunk, num_graphs = 2048, 8
    elif memory_mib < 35 * _GIB_MIB:
        chunk, num_graphs = 2048, 24 if is_narrow else 80
    elif memory_mib < 60 * _GIB_MIB:
        chunk, num_graphs = 4096, 32 if is_narrow else 160
    elif memory_mib < 160 * _GIB_MIB:
        chunk, num_graphs = 8192, 256 if is_narrow else 512
    else:
        chunk, num_graphs = 16384, 512
    reserved_mib = 512 + 1.5 * chunk + 2 * num_graphs + num_gpus / 8 * 1024
    if memory_mib > 60 * _GIB_MIB:
        reserved_mib = max(reserved_mib, 10 * 1024)
    return chunk, round((memory_mib - reserved_mib) / memory_mib, 3)


def tensorrt_llm(device: Device) -> AsShipped:
    """Return the defaults of TensorRT-LLM's LLM API and `trtllm-serve`, 1.0 and later.

    Prompts are not chunked, so those longer than a step are refused.  Its reuse of parts of blocks
    is left out: whole blocks are found, as with vLLM.

    Sources: `tests/unittest/api_stability/references_committed/llm.yaml` (requests, tokens, no
    chunked prefill) and `references/llm.yaml` (overlap); `KvCacheConfig` in `llmapi/llm_args.py`
    (32 tokens a block, reuse, 0.9) and `_cal_max_memory` in `_torch/pyexecutor/_util.py` (of what
    is left).
    """
    kv_tokens, rule = device.kv_cache(
        lambda m: m.tokens_in_rest(0.9), "0.9 of the memory that the model leaves"
    )
    return AsShipped(
        engine="tensorrt-llm 1.0",
        policy="trtllm",
        max_num_batched_tokens=8192,
        max_num_seqs=2048,
        block_size=32,
        prefix_cache=PrefixCaching.HASH,
        overlap=True,
        kv_tokens=kv_tokens,
        kv_memory=rule,
    )


ENGINES: Mapping[str, Callable[[Device], AsShipped]] = {
    "vllm": vllm,
    "vllm-0.6": vllm_0_6,
    "sglang": sglang,
    "tensorrt-llm": tensorrt_llm,
}


def as_shipped(engine: str, model: FittedModel, own_kv_tokens: int) -> AsShipped:
    """Return an engine's scheduler and settings on the device that `model` was measured on.

    `own_kv_tokens` is the size of the KV cache if the device's memory is not known.  Raises
    UnknownEngineError if there is no such engine.
    """
    if engine not in ENGINES:
        raise UnknownEngineError(
            f"no engine {engine!r}{meant(engine, ENGINES)}; there are {', '.join(ENGINES)}"
        )
    return ENGINES[engine](Device.of(model, own_kv_tokens))
