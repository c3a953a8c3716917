"""What is told of prompts is what transformers finds, whatever computes them.

The cases are those of `test_features_together`: chunks of prompts, draft tokens, adapters, several
answers, preemption by swap or recompute, prefix caches and the overlapped loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from mixed_load import PROMPTS, Kind, World, end_of
from served import Ask, Replica, serve
from test_features_together import CASES, Features, asks_for, replica_of, wanted_in

from slosched.core import Limits, SamplingParams
from slosched.engine.torch.forward import ATTENTION_NAME
from slosched.engine.torch.prompt_scores import head_logits
from slosched.kv import PrefixCaching

if TYPE_CHECKING:
    from pathlib import Path

    from slosched.core import PromptLogprobs
    from slosched.engine.torch import LoadedModel

NUM_LIKELIEST = 3
SMALL = Replica(limits=Limits(max_num_batched_tokens=24), num_blocks=18)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    from slosched.engine.torch import load_model

    return load_model("tiny-random", device="cpu", dtype="float32", num_threads=1)


@pytest.fixture(scope="module")
def world(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(model, tmp_path_factory.mktemp("adapters"))


def check(parts: list[PromptLogprobs], ids: list[int], odds: torch.Tensor, num: int) -> None:
    """Check that the parts tell all of a prompt behind its first token, once and rightly."""
    place = 1
    for part in parts:
        assert part.first == place
        assert part.num_likeliest == num
        place += len(part.of_tokens)
    assert place == len(ids)
    own = odds[range(len(ids) - 1), ids[1:]]
    told = [value for part in parts for value in part.of_tokens]
    assert told == pytest.approx(own.tolist(), abs=1e-3)
    ranks = (odds[:-1] > own[:, None]).sum(dim=-1) + 1
    assert [rank for part in parts for rank in part.ranks] == ranks.tolist()
    likeliest = odds[:-1].topk(num)
    values = [value for part in parts for value in part.likeliest]
    assert values == pytest.approx(likeliest.values.flatten().tolist(), abs=1e-3)
    found = [token for part in parts for token in part.likeliest_ids]
    assert found == likeliest.indices.flatten().tolist()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if i % 3 else (), id="-".join(map(str, case)))
        for i, case in enumerate(CASES)
    ],
)
def test_all_prompts_are_told_as_transformers_finds_them(world: World, case: Features) -> None:
    wanted = wanted_in(case)
    asks = asks_for(wanted, world, case)
    asks = [
        replace(ask, sampling=replace(ask.sampling, num_prompt_logprobs=NUM_LIKELIEST))
        for ask in asks
    ]
    run = serve(world.model, replica_of(case), asks)
    tellers = {answer[0].request_id for answer in run.answers if answer[0].num_prompt_tokens > 1}
    assert run.told.keys() == tellers
    for answer, (text, lora, kind) in zip(run.answers, wanted, strict=True):
        for request in answer:
            assert request.output_token_ids == world.expected(text, lora, kind)
            assert request.end_reason is end_of(kind)
        parts = run.told.get(answer[0].request_id, [])
        check(parts, world.ids(text), world.odds(text, lora), NUM_LIKELIEST)
    assert sum(request.num_preemptions for request in run.requests) > 0


def test_a_prompt_in_the_cache_is_computed_again_and_found_by_no_other(world: World) -> None:
    text = PROMPTS[0]
    told = replace(world.sampling[Kind.FREE], num_prompt_logprobs=0)
    asks = [world.ask(text, None, Kind.FREE, arrival_step=30 * i) for i in range(4)]
    asks[1:3] = [replace(ask, sampling=told) for ask in asks[1:3]]
    run = serve(world.model, Replica(prefix_cache=PrefixCaching.HASH), asks)
    cached = [request.num_cached_tokens for request in run.requests]
    assert cached[0] == cached[1] == cached[2] == 0
    assert cached[3] > 0, "the one that asks for nothing finds what the first one left"
    assert run.told.keys() == {"r1", "r2"}
    for parts in run.told.values():
        check(parts, world.ids(text), world.odds(text, None), 0)


@pytest.mark.model
def test_the_real_models_prompt_is_told_as_transformers_finds_it(smollm2: LoadedModel) -> None:
    text = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. " * 4
    ids = smollm2.tokenizer(text).input_ids  # type: ignore[misc]
    sampling = SamplingParams(num_prompt_logprobs=NUM_LIKELIEST)
    run = serve(smollm2, replace(SMALL, num_blocks=64), [Ask(ids, 1, sampling)])
    assert run.num_steps > 2, "a chunk at a time"
    smollm2.model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            odds = smollm2.model(torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    finally:
        smollm2.model.set_attn_implementation(ATTENTION_NAME)
    check(run.told["r0"], ids, odds, NUM_LIKELIEST)


def test_a_prompt_of_one_token_has_nothing_to_tell(world: World) -> None:
    sampling = replace(world.sampling[Kind.FREE], num_prompt_logprobs=2)
    run = serve(world.model, SMALL, [replace(world.ask("h", None, Kind.FREE), sampling=sampling)])
    assert run.told == {}


def test_a_model_that_changes_its_logits_is_asked_for_them(model: LoadedModel) -> None:
    """Some models scale or cap what their last layer returns."""
    ids = torch.tensor([[5, 6, 7, 8]])
    twin = model.model
    original = type(twin).forward

    def scaled(*args: object, **kwargs: object) -> object:
        out = original(twin, *args, **kwargs)
        out.logits = 7 * torch.tanh(out.logits / 7)
        return out

    twin.set_attn_implementation("eager")
    twin.forward = scaled
    try:
        with torch.inference_mode():
            of_decoder = twin.base_model(ids)
            hidden = of_decoder.last_hidden_state[0]
            assert torch.equal(head_logits(twin, of_decoder, hidden), twin(ids).logits[0])
            assert twin(ids).logits.abs().max() < 7
    finally:
        del twin.forward
        twin.set_attn_implementation(ATTENTION_NAME)


SMALL_MODEL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "initializer_range": 0.3,
}


@pytest.mark.parametrize(
    ("config_name", "changes"),
    [
        # Its head asks for more than the hidden states.
        ("MixtralConfig", {"num_local_experts": 4, "num_key_value_heads": 2}),
        # It calls a part of its base model.
        ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 64, "init_std": 0.3}),
    ],
)
def test_odd_models_are_told_as_transformers_finds_them(
    tmp_path: Path, config_name: str, changes: dict[str, Any]
) -> None:
    from slosched.engine.torch import load_model

    getattr(transformers, config_name)(**SMALL_MODEL, **changes).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32", load_format="dummy")
    ids = [token % 96 for token in range(3, 300, 7)]
    run = serve(model, SMALL, [Ask(ids, 1, SamplingParams(num_prompt_logprobs=NUM_LIKELIEST))])
    model.model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        odds = model.model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    check(run.told["r0"], ids, odds, NUM_LIKELIEST)
