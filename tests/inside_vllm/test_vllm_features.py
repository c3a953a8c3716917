"""LoRA, structured output, speculation and windows: the same answers with slosched's scheduler as
without.

vLLM runs in this process, with a small model of random weights and a real tokenizer.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from safetensors.torch import save_file
from smollm2 import smollm2, vllm_has_kernels
from transformers import LlamaConfig, LlamaForCausalLM
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams

from slosched.integrations.vllm.truth import Truth

pytestmark = vllm_has_kernels

HIDDEN, NUM_LAYERS, RANK = 128, 2, 8
NUM_TOKENS = 12
PROMPTS = (
    "The capital of France is",
    "one two three one two three one two three one two",
    "Once upon a time, in a village by the sea, there lived an old man who had never been to sea",
    "Water boils at",
)
POLICIES = ("sjf:token_budget=16", "fcfs")
"""One policy that orders and cuts differently from vLLM, and one that decides as vLLM does."""


@dataclass(frozen=True)
class Ask:
    prompt: str
    sampling: SamplingParams
    lora: LoRARequest | None = None


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, **options)


@pytest.fixture(scope="module", autouse=True)
def in_this_process() -> Iterator[None]:
    # vLLM patches its kernels once per process, and would do so again for the next model.  That
    # would fail on a module of llvmlite that speculation has imported by then.
    platform = type(current_platform)
    register = cache(platform.register_triton_kernel_overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(platform, "register_triton_kernel_overrides", lambda *_: register())
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = smollm2()
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    return [
        LoRARequest(f"adapter{i}", i, str(make_adapter(tmp_path_factory.mktemp("lora"), seed=i)))
        for i in (1, 2)
    ]


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a random adapter, strong enough to change the answers, and return its folder."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(NUM_LAYERS):
        for part in ("q_proj", "v_proj", "o_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=random)
            tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=random)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj", "o_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Run:
    tokens: list[tuple[int, ...]]
    texts: list[str]
    truth: Truth | None
    """The truth of slosched's scheduler, if it was used."""
    num_drafts: int
    """Draft tokens that vLLM scheduled."""
    num_groups: int
    """Groups of layers with blocks of their own."""


def run(model: Path, asks: Sequence[Ask], policy: str | None, **options: Any) -> Run:
    """Run all requests at once in a new vLLM."""
    if policy is not None:
        options["scheduler_cls"] = "slosched.integrations.vllm.SLOScheduler"
        settings = {"policy": policy, "slo_ttft_s": 60, "slo_tpot_s": 60}
        options["additional_config"] = {"slosched": settings}
    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        num_gpu_blocks_override=64,
        block_size=32,
        kv_cache_memory_bytes=1 << 26,
        **options,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    drafts = count_drafts(scheduler)
    try:
        answers = llm.generate(
            [ask.prompt for ask in asks],
            [ask.sampling for ask in asks],
            lora_request=[ask.lora for ask in asks],
            use_tqdm=False,
        )
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()
    return Run(
        [tuple(answer.outputs[0].token_ids) for answer in answers],
        [answer.outputs[0].text for answer in answers],
        getattr(scheduler, "truth", None),
        sum(drafts),
        len(scheduler.kv_cache_config.kv_cache_groups),
    )


def count_drafts(scheduler: Any) -> list[int]:
    """Return a list that gets the number of draft tokens of every step as it comes."""
    counts: list[int] = []
    schedule = scheduler.schedule

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        counts.append(sum(map(len, output.scheduled_spec_decode_tokens.values())))
        return output

    scheduler.schedule = counted
    return counts


def check(model: Path, asks: Sequence[Ask], **options: Any) -> Run:
    """Check that every policy gives the same answers as vLLM alone, and return those."""
    alone = run(model, asks, None, **options)
    assert alone.truth is None
    for policy in POLICIES:
        ours = run(model, asks, policy, **options)
        assert ours.tokens == alone.tokens
        assert ours.truth is not None
        assert ours.truth.num_steps > NUM_TOKENS / 4
        assert not ours.truth.fallbacks
        assert not ours.truth.divergences
        assert bool(ours.num_drafts) is bool(alone.num_drafts)
    return alone


def test_lora(model: Path, adapters: list[LoRARequest]) -> None:
    # Every request has an adapter: in vLLM's CPU build, one without would get another request's.
    asks = [Ask(prompt, greedy(), lora) for prompt in PROMPTS[:2] for lora in adapters]
    found = check(model, asks, enable_lora=True, max_loras=1, max_lora_rank=RANK)
    assert len(set(found.tokens)) == len(asks), "every adapter has a voice of its own"


def test_structured_output(model: Path) -> None:
    date = StructuredOutputsParams(regex=r"20\d\d-\d\d")
    choice = StructuredOutputsParams(choice=["maybe", "never"])
    asks = [Ask(prompt, greedy(structured_outputs=date)) for prompt in PROMPTS[:2]]
    asks += [Ask(PROMPTS[2], greedy(structured_outputs=choice)), Ask(PROMPTS[3], greedy())]
    found = check(model, asks)
    assert all(text.startswith("20") and text[4] == "-" for text in found.texts[:2])
    assert found.texts[2] in ("maybe", "never")


def test_speculation(model: Path) -> None:
    asks = [Ask(prompt, greedy(ignore_eos=True)) for prompt in PROMPTS]
    ngram = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    }
    found = check(model, asks, speculative_config=ngram)
    assert found.num_drafts
    assert found.tokens == run(model, asks, None).tokens, "drafts do not change what is said"


def test_sliding_windows_in_some_layers(model: Path) -> None:
    asks = [Ask(prompt, greedy(ignore_eos=True)) for prompt in PROMPTS]
    windows = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    found = check(model, asks, hf_overrides=windows)
    assert found.num_groups == 2
    assert found.tokens != run(model, asks, None).tokens, "the window hides something"
