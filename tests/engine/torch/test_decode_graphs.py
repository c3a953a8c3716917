"""Steps of decodes that are padded to fixed sizes, and run from buffers that never move."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from batches import make_batch, make_chunk, make_prompt_request
from gpu_models import tiny_on_gpu
from greedy import generated

from slosched.core import PLACEHOLDER, Request, ScheduledBatch, SchedulerOutput
from slosched.engine.torch import BackendUnavailableError, LoadedModel, TorchExecutor, load_model
from slosched.engine.torch.attention import BACKENDS, AttentionPlan, KernelLimits, PagedBatch
from slosched.engine.torch.graphs import DecodeGraphs, graph_sizes
from slosched.engine.torch.kv_cache import PagedKVCache
from slosched.perfmodel.errors import FitError

torch.set_num_threads(1)

BLOCK_SIZE = 4
SIZES = (2, 4)
PROMPTS = ([30, 71, 200, 9, 9, 150, 42, 17, 101, 5, 77], [44, 3, 250, 120, 8], [7, 7, 1])


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny-random", device="cpu", dtype="float32")


@dataclass
class Noting:
    """The model's attention, which notes how many tokens each step computes."""

    model: LoadedModel
    num_tokens: list[int]
    name = "noting"
    limits = KernelLimits()

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        self.num_tokens.append(len(batch.positions))
        return self.model.backend.plan(batch)


def test_padding_changes_no_token_and_no_block(tiny: LoadedModel) -> None:
    """Prefills, steps of 1, 2 and 3 decodes, and steps that wait for no token are all the same."""
    noting = Noting(tiny, [])
    executor = TorchExecutor(
        replace(tiny, backend=noting), num_blocks=24, block_size=BLOCK_SIZE, graph_sizes=SIZES
    )
    noting.num_tokens.clear()
    requests = [make_prompt_request(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    found: dict[str, list[int]] = {request.request_id: [] for request in requests}
    pending = []
    for step in range(9):
        joined = requests[: 1 + step // 3]  # one more request in every third step
        batch = make_batch(*(make_chunk(r, table_of(requests.index(r))) for r in joined))
        pending.append(executor.launch(batch))
        for request in joined:
            request.output_token_ids.append(PLACEHOLDER)
            request.num_output_tokens += 1
        if len(pending) == 2:
            note(found, pending.pop(0)())
    note(found, pending.pop()())
    for i, request in enumerate(requests):
        assert found[request.request_id] == generated(tiny, PROMPTS[i], 9 - 3 * i)
    # Steps with a prompt run as they are.
    assert noting.num_tokens == [11, 2, 2, 6, 2, 2, 5, 4, 4]


def table_of(i: int) -> list[int]:
    """Return the blocks of a request; the last request has the last block that there is."""
    return list(range(8 * i + 7, 8 * i - 1, -1)) if i < 2 else [23, 22, 21, 20, 19, 18, 17, 16]


def note(found: dict[str, list[int]], result: object) -> None:
    for name, token in result.token_ids.items():  # type: ignore[attr-defined]
        found[name].append(token)


def test_idle_decodes_write_to_their_own_block_alone(tiny: LoadedModel) -> None:
    cache = PagedKVCache(tiny.geometry, num_blocks=6, block_size=BLOCK_SIZE)
    for layer in range(tiny.geometry.num_layers):
        for part in cache.layer(layer):
            part.fill_(3.0)
    DecodeGraphs(SIZES, tiny, cache)
    for layer in range(tiny.geometry.num_layers):
        for part in cache.layer(layer):
            assert (part[:5] == 3.0).all()
            assert not (part[5] == 3.0).all(), "nothing was computed"


def test_which_steps_are_padded(tiny: LoadedModel) -> None:
    cache = PagedKVCache(tiny.geometry, num_blocks=6, block_size=BLOCK_SIZE)
    graphs = DecodeGraphs(SIZES, tiny, cache)

    def decode(name: str, lora_id: str | None = None) -> Request:
        request = make_prompt_request(name, [1, 2, 3])
        request.num_computed_tokens, request.lora_id = 2, lora_id
        return request

    def num_idle(*requests: Request) -> int | None:
        return graphs.num_idle(make_batch(*(make_chunk(r, [0]) for r in requests)))

    assert [num_idle(*map(decode, "abcde"[:n])) for n in range(1, 6)] == [1, 0, 1, 0, None]
    assert num_idle(decode("a"), make_prompt_request("b", [1, 2])) is None
    assert num_idle(decode("a", "an adapter")) is None
    chunk = make_chunk(decode("a"), [0])
    drafting = SchedulerOutput(draft_token_ids={"a": (1,)})
    batch = ScheduledBatch((chunk,), (), (), make_batch(chunk).shape, drafting)
    assert graphs.num_idle(batch) is None
    unfinished = make_batch(make_chunk(make_prompt_request("p", [1, 2, 3]), [0], 1))
    assert graphs.num_idle(unfinished) is None
    assert DecodeGraphs((), tiny, cache).num_idle(make_batch(chunk)) is None


def test_sizes_that_are_asked_for(tiny: LoadedModel) -> None:
    assert graph_sizes("auto", tiny, 32) == graph_sizes("none", tiny, 32) == ()
    assert graph_sizes("8,1,2,4", tiny, 32) == (1, 2, 4, 8)
    assert graph_sizes("8,1,2,4", tiny, 3) == (1, 2, 4), "no step has five decodes"
    assert graph_sizes("vllm", tiny, 20) == (1, 2, 4, 8, 16, 24)
    with pytest.raises(FitError, match="'many'"):
        graph_sizes("many", tiny, 32)
    on_gpu = replace(tiny, device=torch.device("cuda"))
    assert graph_sizes("auto", on_gpu, 32) == (), "sdpa cannot be captured"
    with pytest.raises(BackendUnavailableError, match="--graph-sizes none"):
        graph_sizes("1,2", on_gpu, 32)
    capturable = replace(on_gpu, backend=Noting(tiny, []))
    capturable.backend.limits = KernelLimits(is_capturable=True)  # type: ignore[misc]
    assert graph_sizes("auto", capturable, 20) == (1, 2, 4, 8, 16, 20)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="capturing needs a GPU; none is here")
@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "sdpa"])
def test_a_captured_graph_gives_the_same_tokens(name: str) -> None:
    model = tiny_on_gpu(name)
    if not model.backend.limits.is_capturable:
        pytest.skip(f"{name} is not known to run in CUDA graphs")
    tokens = []
    for sizes in ((), SIZES):
        executor = TorchExecutor(model, num_blocks=8, block_size=16, graph_sizes=sizes)
        request = make_prompt_request("r", PROMPTS[0])
        for _ in range(12):
            result = executor.execute(make_batch(make_chunk(request, [3, 1])))
            request.output_token_ids.append(result.token_ids["r"])
            request.num_output_tokens += 1
        tokens.append(request.output_token_ids)
    assert tokens[0] == tokens[1]
