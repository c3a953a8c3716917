"""The cost of a swapped KV block where it was not measured."""

from __future__ import annotations

import math

import pytest
from factories import make_model

from slosched.core import BatchShape
from slosched.perfmodel import (
    FittedModel,
    at_block_size,
    bundled_models,
    load_model,
    swap_cost,
    with_derived_swap,
    with_swap_bandwidth,
)
from slosched.perfmodel.forms import described, with_swapped_block_s
from slosched.perfmodel.swap import SWAP_ORIGIN, SwapCostError

GPUS = [name for name in bundled_models() if not name.startswith("cpu/")]


def copying(num_blocks: int, *chunks: tuple[int, int]) -> BatchShape:
    shape = BatchShape()
    for chunk in chunks:
        shape.add(*chunk)
    shape.num_swapped_blocks = num_blocks
    return shape


def free(model: FittedModel) -> FittedModel:
    """Return the model as it was before its swap cost was derived."""
    facts = {k: v for k, v in model.provenance.items() if k != SWAP_ORIGIN}
    return with_swapped_block_s(model, 0.0, facts)


@pytest.mark.parametrize("name", GPUS)
def test_every_bundled_gpu_has_the_cost_that_its_link_and_model_give(name: str) -> None:
    model = load_model(name)
    again = with_derived_swap(free(model))
    assert model.swapped_block_s == again.swapped_block_s > 0
    assert dict(model.provenance) == dict(again.provenance)
    assert model.provenance[SWAP_ORIGIN].startswith("derived, not measured: ")
    assert model.predict(copying(10)) == pytest.approx(10 * model.swapped_block_s)


def test_the_cost_is_the_blocks_bytes_over_the_links_of_all_gpus() -> None:
    """Keys and values of 8 heads of 128 numbers of 2 bytes are 4 KiB for each layer and token."""
    llama_8b = load_model("a100/llama-3.1-8b")
    assert llama_8b.swapped_block_s == pytest.approx(16 * 32 * 4096 / 24.8e9)
    llama_70b = load_model("h100/llama-3.1-70b-tp4")
    assert llama_70b.swapped_block_s == pytest.approx(16 * 80 * 4096 / 4 / 55.6e9)


def test_a_model_that_says_how_large_its_cache_is_need_not_be_known() -> None:
    model = load_model("h200/llama-3.1-8b")
    facts = {**model.provenance, "model": "nobody/knows-this", "kv_bytes_per_token_per_gpu": "1000"}
    mine = with_derived_swap(described(free(model), facts, {}))
    assert mine.swapped_block_s == pytest.approx(16 * 1000 / 55.6e9)
    assert "1000 bytes a token" in swap_cost(mine)


@pytest.mark.parametrize("name", GPUS)
def test_steps_without_copies_take_what_they_took_to_the_bit(name: str) -> None:
    model = load_model(name)
    before = free(model)
    for chunks in (((1, 100),), ((512, 0), (1, 900)), ((2048, 4096),), ((1, 77),) * 64):
        assert model.predict(copying(0, *chunks)) == before.predict(copying(0, *chunks))


def test_a_bandwidth_of_ones_own_sets_the_cost_and_says_so() -> None:
    model = with_swap_bandwidth(load_model("rtx4090/llama-3.1-8b"), 10e9)
    assert model.swapped_block_s == pytest.approx(16 * 131_072 / 10e9)
    assert "10 GB/s as asked for" in swap_cost(model)
    assert with_swap_bandwidth(model, math.inf).swapped_block_s == 0
    with pytest.raises(ValueError, match="must be positive"):
        with_swap_bandwidth(model, 0.0)


def test_larger_blocks_cost_more() -> None:
    for name in ("rtx4090/llama-3.1-8b", "cpu/smollm2-135m"):
        model = load_model(name)
        assert at_block_size(model, 16) is model
        larger = at_block_size(model, 32)
        assert larger.swapped_block_s == 2 * model.swapped_block_s
        assert at_block_size(larger, 16).swapped_block_s == model.swapped_block_s


def test_what_was_measured_or_is_not_known_stays_as_it_is() -> None:
    measured = load_model("cpu/smollm2-135m")
    assert with_derived_swap(measured) is measured
    assert swap_cost(measured).endswith("measured")
    unknown = make_model(per_swapped_block_s=0.0)
    assert with_derived_swap(unknown) is unknown
    assert "costs nothing" in swap_cost(unknown)
    with pytest.raises(SwapCostError, match="the sizes of 'this model' are not known"):
        with_swap_bandwidth(unknown, 1e9)


def test_the_linear_form_takes_the_cost_too() -> None:
    facts = {"gpu": "NVIDIA H200", "model": "Qwen/Qwen3-8B", "dtype": "bfloat16"}
    model = with_derived_swap(with_swapped_block_s(make_model(), 0.0, facts))
    assert model.form == "linear"
    assert model.swapped_block_s == pytest.approx(16 * 36 * 4096 / 55.6e9)
