"""Models with a sliding window give back KV blocks, and their greedy tokens are `generate`'s."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from greedy import generated
from served import BLOCK_SIZE, Ask, Replica, serve, was_refused

from slosched.core import Limits, PreemptionMode
from slosched.kv import PrefixCaching
from slosched.policy import POLICIES

if TYPE_CHECKING:
    from slosched.engine.torch import LoadedModel

WINDOW = 3 * BLOCK_SIZE - 1
MAX_TOKENS = 24
LENGTHS = (41, 5, 12, 60, 41, 11)
NUM_BLOCKS = 28


def windowed_model(folder: Path, kind: str = "mistral", **changes: Any) -> LoadedModel:
    """Return a model of random weights; by default every layer has the same window."""
    from transformers import AutoConfig

    from slosched.engine.torch import load_model

    config = AutoConfig.for_model(
        kind,
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.3,
        sliding_window=WINDOW,
        **changes,
    )
    config.save_pretrained(folder)
    return load_model(
        str(folder), device="cpu", dtype="float32", load_format="dummy", num_threads=1
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return windowed_model(tmp_path_factory.mktemp("mistral"))


def asks() -> list[Ask]:
    prompts = [[(7 * n + 13 * i * i) % 259 for i in range(n)] for n in LENGTHS]
    return [Ask(prompt, MAX_TOKENS, arrival_step=2 * i) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> list[list[int]]:
    return [generated(model, ask.prompt, MAX_TOKENS) for ask in asks()]


RECOMPUTE, SWAP = PreemptionMode
REPLICAS = [
    ("fcfs", False, SWAP),
    ("goodput", True, SWAP),
    ("vllm_v0", False, RECOMPUTE),
    ("trtllm", True, RECOMPUTE),
    ("vllm_v0", True, SWAP),
    ("goodput", False, RECOMPUTE),
]
"""Loops and preemption modes in all combinations, each with a policy that is often used."""
REST = [each for each in product(POLICIES, (False, True), PreemptionMode) if each not in REPLICAS]
"""The rest of the product, which `make test-slow` runs."""


@pytest.mark.parametrize(
    ("policy", "overlap", "mode"),
    [*REPLICAS, *(pytest.param(*replica, marks=pytest.mark.slow) for replica in REST)],
)
def test_greedy_tokens_are_those_of_generate(
    model: LoadedModel,
    expected: list[list[int]],
    policy: str,
    overlap: bool,
    mode: PreemptionMode,
) -> None:
    limits = Limits(max_num_batched_tokens=96, preemption_mode=mode)
    replica = Replica(policy, limits, NUM_BLOCKS, overlap=overlap, num_draft_tokens=2)
    for request, output in zip(serve(model, replica, asks()).requests, expected, strict=True):
        assert request.output_token_ids == ([] if was_refused(request, policy) else output)


def test_all_run_at_once_where_two_would_fit_without_a_window(
    model: LoadedModel, expected: list[list[int]]
) -> None:
    replica = Replica(limits=Limits(max_num_batched_tokens=16), num_blocks=NUM_BLOCKS)
    run = serve(model, replica, asks())
    assert run.outputs == expected
    assert not any(request.num_preemptions for request in run.requests)
    # A prefix cache keeps all blocks, so that the same requests have to make room.
    kept = Replica(limits=replica.limits, num_blocks=NUM_BLOCKS, prefix_cache=PrefixCaching.HASH)
    run = serve(model, kept, asks())
    assert run.outputs == expected
    assert any(request.num_preemptions for request in run.requests)


def test_the_window_decides_the_tokens(
    model: LoadedModel, expected: list[list[int]], tmp_path: Path
) -> None:
    """Otherwise the tests above would say nothing of what may be given back."""
    wider = windowed_model(tmp_path)
    wider.model.set_attn_implementation("sdpa")
    for layer in wider.model.model.layers:
        layer.self_attn.sliding_window = None
    wider.model.config.sliding_window = None
    assert generated(wider, asks()[0].prompt, MAX_TOKENS) != expected[0]
    assert model.window_tokens == WINDOW


def test_a_model_with_some_full_layers_keeps_all_blocks(tmp_path: Path) -> None:
    layer_types = ["sliding_attention", "full_attention"]
    mixed = windowed_model(tmp_path, "qwen2", use_sliding_window=True, layer_types=layer_types)
    assert mixed.window_tokens is None
    expected = [generated(mixed, ask.prompt, MAX_TOKENS) for ask in asks()[:2]]
    assert serve(mixed, Replica(), asks()[:2]).outputs == expected
