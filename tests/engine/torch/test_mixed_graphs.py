"""Steps of chunks and decodes that are padded to fixed numbers of tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from batches import book, make_batch, make_chunk, make_prompt_request
from gpu_models import tiny_on_gpu
from greedy import generated
from torch import Tensor

from slosched.core import Request, ScheduledBatch, SchedulerOutput
from slosched.engine.torch import LoadedModel, TorchExecutor, load_model
from slosched.engine.torch.attention import (
    BACKENDS,
    AttentionPlan,
    KernelLimits,
    PagedBatch,
    Scoring,
)
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.engine.torch.mixed_graphs import MixedGraphs, mixed_graph_sizes

torch.set_num_threads(1)

BLOCK_SIZE = 16
SIZES = (8, 16, 24)
PROMPTS = ([30, 71, 200, 9, 9, 150, 42, 17, 101, 5, 77] * 2, [44, 3, 250, 120, 8], [7, 7, 1])
CHUNKS = ((15, 0, 0), (7, 5, 0), (1, 1, 3), (1, 1, 1), (1, 1, 1))
"""How many tokens of each request a step computes: 15, 12, 5 and 3."""


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny-random", device="cpu", dtype="float32")


def run(executor: TorchExecutor) -> dict[str, list[int]]:
    """Play the steps, and return the output tokens by request."""
    requests = [make_prompt_request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    for counts in CHUNKS:
        chunks = [
            make_chunk(request, [2 * i + 1, 2 * i], count)
            for i, (request, count) in enumerate(zip(requests, counts, strict=True))
            if count
        ]
        batch = make_batch(*chunks)
        book(batch, executor.execute(batch))
    return {request.request_id: request.output_token_ids for request in requests}


def check_tokens(model: LoadedModel, found: dict[str, list[int]]) -> None:
    """Check that the tokens of `run` are those of `generate`."""
    assert found == {
        f"r{i}": generated(model, prompt, len(found[f"r{i}"])) for i, prompt in enumerate(PROMPTS)
    }
    assert [len(tokens) for tokens in found.values()] == [4, 4, 3]


def test_a_kernel_that_knows_only_the_capture_gives_the_same_tokens() -> None:
    """Triton's interpreter runs our kernel with the facts that a graph would replay."""
    model = load_model("tiny-random", device="cpu", dtype="float32", attention="triton")
    executor = TorchExecutor(
        model, num_blocks=6, block_size=BLOCK_SIZE, mixed_graph_sizes=SIZES, most_sequences=5
    )
    assert executor._mixed.size_for(make_batch(make_chunk(make_prompt_request("a", [1]), [0]))) == 8
    check_tokens(model, run(executor))


def test_padding_changes_no_token(tiny: LoadedModel) -> None:
    executor = TorchExecutor(
        tiny, num_blocks=6, block_size=BLOCK_SIZE, mixed_graph_sizes=SIZES, most_sequences=3
    )
    check_tokens(tiny, run(executor))


def test_padding_writes_to_its_own_block_alone(tiny: LoadedModel) -> None:
    cache = PagedKVCache(tiny.geometry, num_blocks=3, block_size=BLOCK_SIZE)
    for layer in range(tiny.geometry.num_layers):
        for part in cache.layer(layer):
            part.fill_(3.0)
    MixedGraphs(SIZES, 3, tiny, cache)
    for layer in range(tiny.geometry.num_layers):
        for part in cache.layer(layer):
            assert (part[:2] == 3.0).all()
            assert not (part[2] == 3.0).all(), "nothing was computed"


@dataclass
class OneSequence:
    """The model's attention, which gives padded steps wrong results."""

    model: LoadedModel
    name = "one-sequence"
    limits = KernelLimits()

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        self._is_padded = len(batch.context_lens) > len(batch.num_new_tokens)
        self._plan = self.model.backend.plan(batch)
        return self

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        out = self._plan.attend(query, k_cache, v_cache, scoring)
        return out.roll(1, 0) if self._is_padded else out


def test_steps_run_as_they_are_where_padding_changes_them(
    tiny: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    cache = PagedKVCache(tiny.geometry, num_blocks=6, block_size=BLOCK_SIZE)
    batch = make_batch(make_chunk(make_prompt_request("a", [1, 2, 3]), [0]))
    wrong = replace(tiny, backend=OneSequence(tiny))
    graphs = MixedGraphs(SIZES, 3, wrong, cache)
    assert graphs.size_for(batch) is None
    assert graphs.sizes == (), "a profile would say that there are graphs"
    assert "one-sequence" in caplog.text
    for part in cache.layer(0):
        assert not part[:3].any(), "the blocks of the proof are not cleared"


def test_a_cache_of_one_block_can_measure_what_graphs_take() -> None:
    model = load_model("tiny-random", device="cpu", dtype="float32", attention="triton")
    cache = PagedKVCache(model.geometry, num_blocks=2, block_size=4)
    MixedGraphs(SIZES, 1, model, cache)
    for layer in range(model.geometry.num_layers):
        for part in cache.layer(layer):
            assert part.isfinite().all()
            assert not part[0].any(), "only padding has been computed"


def test_which_steps_are_padded(tiny: LoadedModel) -> None:
    cache = PagedKVCache(tiny.geometry, num_blocks=6, block_size=BLOCK_SIZE)
    graphs = MixedGraphs(SIZES, 2, tiny, cache)

    def prompt(name: str, num_tokens: int, lora_id: str | None = None) -> Request:
        request = make_prompt_request(name, list(range(1, num_tokens + 1)))
        request.lora_id = lora_id
        return request

    def size(*requests: Request) -> int | None:
        return graphs.size_for(make_batch(*(make_chunk(r, [0, 1]) for r in requests)))

    assert [size(prompt("a", n)) for n in (1, 8, 9, 24, 25)] == [8, 8, 16, 24, None]
    assert size(prompt("a", 5), prompt("b", 6)) == 16
    assert size(prompt("a", 1), prompt("b", 1), prompt("c", 1)) is None, "more than two sequences"
    assert size(prompt("a", 3, "an adapter")) is None
    chunk = make_chunk(prompt("a", 3), [0])
    drafting = SchedulerOutput(draft_token_ids={"a": (1,)})
    batch = ScheduledBatch((chunk,), (), (), make_batch(chunk).shape, drafting)
    assert graphs.size_for(batch) is None
    assert MixedGraphs((), 2, tiny, cache).size_for(make_batch(chunk)) is None


def test_sizes_are_those_of_a_gpu_whose_attention_can_be_captured(tiny: LoadedModel) -> None:
    assert mixed_graph_sizes((1, 2), tiny) == (), "a CPU captures nothing"
    on_gpu = replace(tiny, device=torch.device("cuda"))
    assert mixed_graph_sizes((1, 2), on_gpu) == (), "nor does this attention"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="capturing needs a GPU; none is here")
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "sdpa"])
def test_captured_graphs_give_the_same_tokens(name: str) -> None:
    model = tiny_on_gpu(name)
    if not mixed_graph_sizes((1,), model):
        pytest.skip(f"{name} is not known to run in CUDA graphs of chunks")
    plain = run(TorchExecutor(model, num_blocks=6, block_size=BLOCK_SIZE))
    graphs = TorchExecutor(
        model, num_blocks=6, block_size=BLOCK_SIZE, mixed_graph_sizes=SIZES, most_sequences=5
    )
    step = make_batch(make_chunk(make_prompt_request("a", [1]), [0]))
    assert graphs._mixed.size_for(step) == 8, "they were found wrong when they were captured"
    assert run(graphs) == plain
