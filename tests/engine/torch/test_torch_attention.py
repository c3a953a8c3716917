"""With paged, chunked, mixed and shuffled KV, the logits are still those of eager attention."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from slosched.engine.torch.attention import AttentionPlan, PagedBatch, Scoring
from slosched.engine.torch.attention.sdpa import SdpaBackend
from slosched.engine.torch.forward import ATTENTION_NAME, UnsupportedModelError, forward
from slosched.engine.torch.guards import check_against_eager, probe
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.engine.torch.step_inputs import Spans, StepInputs

torch.set_num_threads(1)

VOCAB_SIZE = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"]
DEEPSEEK = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 4,
    "first_k_dense_replace": 2,
    "num_key_value_heads": 4,
}
FITTING = {
    "llama": ("LlamaConfig", {}),
    "llama_multi_head": ("LlamaConfig", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral_window": ("MistralConfig", {"sliding_window": 7}),
    "gemma3_window": ("Gemma3TextConfig", {"sliding_window": 5, "layer_types": ALTERNATING}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "opt": (
        "OPTConfig",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "do_layer_norm_before": True, "init_std": 0.3},
    ),
}


def build(config_name: str, **changes: Any) -> Any:
    """Return a small model with random weights and slosched's attention."""
    config = getattr(transformers, config_name)(**{**SMALL, **changes})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        ).eval()


def eager_logits(model: Any, token_ids: Tensor) -> Tensor:
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return model(input_ids=token_ids[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def paged_logits(
    model: Any, sequences: Sequence[Tensor], block_size: int, rng: random.Random
) -> list[Tensor]:
    """Return every sequence's logits from passes over random mixtures of decodes and chunks."""
    num_blocks = sum(-(-len(ids) // block_size) for ids in sequences) + 3
    cache = PagedKVCache(probe(model).geometry, num_blocks=num_blocks, block_size=block_size)
    inputs = StepInputs(block_size, torch.device("cpu"))
    free = rng.sample(range(num_blocks), num_blocks)
    tables = [[free.pop() for _ in range(-(-len(ids) // block_size))] for ids in sequences]
    done = [0] * len(sequences)
    logits: list[list[Tensor]] = [[] for _ in sequences]
    while any(d < len(ids) for d, ids in zip(done, sequences, strict=True)):
        spans, new_ids, owners = [], [], []
        for i in rng.sample(range(len(sequences)), len(sequences)):
            left = len(sequences[i]) - done[i]
            if left and rng.random() < 0.8:
                n = 1 if rng.random() < 0.5 else rng.randint(1, left)
                spans.append((n, done[i], tables[i]))
                new_ids.append(sequences[i][done[i] : done[i] + n])
                owners.append(i)
                done[i] += n
        if spans:
            flat = torch.cat(new_ids).tolist()
            step_input = inputs.fill(owners, Spans.of(spans), flat, range(len(flat)))
            rows = forward(model, step_input, cache, SdpaBackend())
            for i, part in zip(owners, rows.split([len(ids) for ids in new_ids]), strict=True):
                logits[i].append(part)
    return [torch.cat(parts) for parts in logits]


@pytest.mark.parametrize("family", FITTING)
@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_logits_equal_eager(family: str, block_size: int) -> None:
    config_name, changes = FITTING[family]
    model = build(config_name, **changes)
    rng = random.Random(block_size)
    generator = torch.Generator().manual_seed(block_size)
    lengths = (1, 9, 23, 70, 90)
    sequences = [torch.randint(VOCAB_SIZE, (n,), generator=generator) for n in lengths]
    for ids, got in zip(sequences, paged_logits(model, sequences, block_size, rng), strict=True):
        expected = eager_logits(model, ids)
        assert expected.std() > 0.05, "the weights are too small for the comparison to mean much"
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FITTING)
def test_guards_accept_what_fits(family: str) -> None:
    config_name, changes = FITTING[family]
    model = build(config_name, **changes)
    probed = probe(model)
    assert (probed.geometry.num_layers, probed.geometry.head_dim) == (2, 8)
    check_against_eager(model, probed, SdpaBackend(), max_model_len=256)


@pytest.mark.parametrize(
    ("config_name", "changes", "reason"),
    [
        ("Gemma2Config", {}, "soft-capped"),
        ("BloomConfig", {"n_layer": 2, "n_head": 4}, "called for layers \\[\\]"),
        ("StableLmConfig", {}, "StableLmForCausalLM does not run with slosched's attention"),
        ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}, "sinks"),
        ("DeepseekV3Config", DEEPSEEK, "keys of 12 and values of 8"),
        (
            "PhimoeConfig",
            {"sliding_window": 40, "num_local_experts": 4},
            "sliding_window=40, but no layer hands one",
        ),
        (
            "Qwen3NextConfig",
            {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0},
            "called for layers \\[1\\]",
        ),
    ],
)
def test_models_that_need_more_are_refused(
    config_name: str, changes: dict[str, Any], reason: str
) -> None:
    model = build(config_name, **changes)
    with pytest.raises(UnsupportedModelError, match=reason):
        check_against_eager(model, probe(model), SdpaBackend(), max_model_len=256)


class _BlindToWindows(SdpaBackend):
    """A backend with a bug that made gemma3 silently wrong: it ignores windows."""

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        return _Windowless(super().plan(batch))


class _Windowless:
    def __init__(self, plan: AttentionPlan) -> None:
        self._plan = plan

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        return self._plan.attend(query, k_cache, v_cache, scoring._replace(window=None))


class _ReadsWrongBlocks(SdpaBackend):
    """A backend that confuses the order of the blocks."""

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        reversed_tables = np.ascontiguousarray(batch.host_block_tables[:, ::-1])
        return super().plan(replace(batch, host_block_tables=reversed_tables))


@pytest.mark.parametrize("backend", [_BlindToWindows(), _ReadsWrongBlocks()])
def test_a_wrong_backend_is_caught(backend: SdpaBackend) -> None:
    model = build("MistralConfig", sliding_window=7)
    with pytest.raises(UnsupportedModelError, match="differs from eager attention"):
        check_against_eager(model, probe(model), backend, max_model_len=256)


def test_attention_without_a_step_says_what_to_do() -> None:
    model = build("LlamaConfig")
    with pytest.raises(ValueError, match="set_attn_implementation"):
        model(input_ids=torch.tensor([[1, 2]]), use_cache=False)
