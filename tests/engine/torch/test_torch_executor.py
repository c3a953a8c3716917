"""TorchExecutor driven with batches written by hand, on the tiny model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from batches import GREEDY, book, make_batch, make_chunk, make_prompt_request
from greedy import generated

from slosched.core import PLACEHOLDER, BlockCopy, Request, SamplingParams
from slosched.engine.torch import LoadedModel, TorchExecutor, load_model

torch.set_num_threads(1)

BLOCK_SIZE = 4
PROMPT = [30, 71, 200, 9, 9, 150, 42, 17, 101, 5, 77]
OTHER_PROMPT = [44, 3, 250, 120, 8]


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return load_model("tiny-random", device="cpu", dtype="float32")


@pytest.fixture
def executor(tiny: LoadedModel) -> TorchExecutor:
    return TorchExecutor(tiny, num_blocks=32, block_size=BLOCK_SIZE, num_host_blocks=16)


def run(executor: TorchExecutor, *chunks: object) -> dict[str, int]:
    batch = make_batch(*chunks)  # type: ignore[arg-type]
    result = executor.execute(batch)
    book(batch, result)
    return dict(result.token_ids)


def decode(executor: TorchExecutor, request: Request, table: list[int], num_tokens: int) -> None:
    for _ in range(num_tokens):
        run(executor, make_chunk(request, table))


def test_chunks_and_decodes_give_the_tokens_of_generate(
    tiny: LoadedModel, executor: TorchExecutor
) -> None:
    long, short = make_prompt_request("long", PROMPT), make_prompt_request("short", OTHER_PROMPT)
    long_table, short_table = [7, 3, 30, 12, 1], [2, 29, 0, 8]
    assert run(executor, make_chunk(short, short_table)).keys() == {"short"}
    # The first chunks of the long prompt share their steps with decodes and emit no token.
    for n in (5, 1, 3):
        emitted = run(
            executor, make_chunk(long, long_table, n), make_chunk(short, short_table)
        ).keys()
        assert emitted == {"short"}
    for _ in range(6):
        run(executor, make_chunk(short, short_table), make_chunk(long, long_table))
    assert long.output_token_ids == generated(tiny, PROMPT, 6)
    assert short.output_token_ids == generated(tiny, OTHER_PROMPT, 10)
    assert len(set(short.output_token_ids)) > 3, "a constant output would prove little"


def test_recompute_continues_where_the_output_was(
    tiny: LoadedModel, executor: TorchExecutor
) -> None:
    request = make_prompt_request("r", PROMPT)
    decode(executor, request, [0, 1, 2, 3], 4)
    request.num_computed_tokens = 0
    decode(executor, request, [9, 8, 7, 6, 5], 4)
    assert request.output_token_ids == generated(tiny, PROMPT, 8)


def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_known(
    tiny: LoadedModel, executor: TorchExecutor
) -> None:
    """Each of the first ten results is looked at only when the next step has been launched."""
    long, short = make_prompt_request("long", PROMPT), make_prompt_request("short", OTHER_PROMPT)
    tables = {"long": list(range(6)), "short": list(range(6, 12))}
    found: dict[str, list[int]] = {"long": [], "short": []}
    waiting = []
    for step in range(10):
        # The shorter prompt starts two steps later, and the requests change places.
        requests = [long] if step < 2 else [short, long] if step % 2 else [long, short]
        batch = make_batch(
            *(make_chunk(request, tables[request.request_id]) for request in requests)
        )
        waiting.append(executor.launch(batch))
        for request in requests:
            request.output_token_ids.append(PLACEHOLDER)
            request.num_output_tokens += 1
        if len(waiting) == 2:
            for name, token in waiting.pop(0)().token_ids.items():
                found[name].append(token)
    for name, token in waiting.pop()().token_ids.items():
        found[name].append(token)
    assert found == {
        "long": generated(tiny, PROMPT, 10),
        "short": generated(tiny, OTHER_PROMPT, 8),
    }


@pytest.mark.parametrize("restore", [True, False])
def test_swap_out_and_in(tiny: LoadedModel, executor: TorchExecutor, restore: bool) -> None:
    request = make_prompt_request("r", PROMPT)
    decode(executor, request, [0, 1, 2, 3], 3)
    out = [
        BlockCopy(device, host) for device, host in zip([0, 1, 2, 3], [9, 4, 0, 15], strict=True)
    ]
    # Another request gets its blocks in the same step that swaps them out.
    other = make_prompt_request("other", OTHER_PROMPT * 3)
    executor.execute(make_batch(make_chunk(other, [3, 2, 1, 0]), swap_out=out))
    table = [20, 6, 11, 25, 5]
    back = [BlockCopy(table[i], copy.host_block) for i, copy in enumerate(out)]
    batch = make_batch(make_chunk(request, table), swap_in=back if restore else ())
    book(batch, executor.execute(batch))
    decode(executor, request, table, 4)
    # Without the copy the output has to change; otherwise the test could not fail.
    assert (request.output_token_ids == generated(tiny, PROMPT, 8)) is restore


def test_a_swap_in_may_take_the_device_blocks_of_a_swap_out(
    tiny: LoadedModel, executor: TorchExecutor
) -> None:
    first, second = make_prompt_request("a", PROMPT), make_prompt_request("b", PROMPT[::-1])
    decode(executor, first, [0, 1, 2, 3], 2)
    executor.execute(make_batch(swap_out=[BlockCopy(i, i) for i in range(4)]))
    decode(executor, second, [3, 2, 1, 0], 2)
    exchange = make_batch(
        make_chunk(first, [3, 2, 1, 0]),
        swap_out=[BlockCopy(i, 7 - i) for i in (3, 2, 1, 0)],
        swap_in=[BlockCopy(3 - i, i) for i in range(4)],
    )
    book(exchange, executor.execute(exchange))
    back = make_batch(swap_in=[BlockCopy(10 + i, 4 + i) for i in range(4)])
    result = executor.execute(back)
    assert not result.token_ids
    assert result.elapsed_s > 0
    decode(executor, second, [10, 11, 12, 13], 2)
    assert first.output_token_ids == generated(tiny, PROMPT, 3)
    assert second.output_token_ids == generated(tiny, PROMPT[::-1], 4)


def test_a_chunk_without_tokens_can_be_timed(executor: TorchExecutor) -> None:
    request = Request("profile", 0.0, num_prompt_tokens=40, max_tokens=5)
    request.num_computed_tokens = 39
    result = executor.execute(make_batch(make_chunk(request, list(range(10)))))
    assert result.token_ids.keys() == {"profile"}
    assert 0 < result.elapsed_s < 60


def test_lora_is_refused(executor: TorchExecutor) -> None:
    request = make_prompt_request("r", PROMPT)
    request.lora_id = "legal"
    with pytest.raises(ValueError, match="'legal'"):
        executor.execute(make_batch(make_chunk(request, [0, 1, 2])))


def stopped_with(executor: TorchExecutor, sampling: SamplingParams, num_tokens: int) -> list[int]:
    """Return the output positions at which the executor reports a stop."""
    request = make_prompt_request("r", PROMPT, sampling)
    stops = []
    for position in range(num_tokens):
        batch = make_batch(make_chunk(request, [0, 1, 2, 3, 4, 5]))
        result = executor.execute(batch)
        book(batch, result)
        if result.stopped:
            assert result.stopped == {"r"}
            stops.append(position)
    executor.release("r")
    return stops


def test_stop_tokens_end_of_sequence_and_min_tokens(tiny: LoadedModel) -> None:
    greedy = generated(tiny, PROMPT, 6)
    first_of_its_kind = next(i for i in range(1, 6) if greedy[i] not in greedy[:i])
    stop = greedy[first_of_its_kind]
    executor = TorchExecutor(tiny, num_blocks=8, block_size=BLOCK_SIZE)
    explicit = replace(GREEDY, stop_token_ids=(stop,))
    assert stopped_with(executor, explicit, first_of_its_kind + 1) == [first_of_its_kind]
    ends_early = replace(tiny, eos_token_ids=frozenset({stop}))
    executor = TorchExecutor(ends_early, num_blocks=8, block_size=BLOCK_SIZE)
    obeying = SamplingParams()
    assert stopped_with(executor, obeying, first_of_its_kind + 1) == [first_of_its_kind]
    assert stopped_with(executor, GREEDY, 6) == []
    late = replace(obeying, min_tokens=6)
    assert stopped_with(executor, late, 6) == []


def sampled(executor: TorchExecutor, sampling: SamplingParams, *, crowded: bool) -> list[int]:
    """Return ten tokens, sampled alone or with another sampling request in every batch."""
    request = make_prompt_request("r", PROMPT, sampling)
    other = make_prompt_request("o", OTHER_PROMPT, SamplingParams(temperature=1.0, seed=99))
    for _ in range(10):
        chunks = [make_chunk(request, [0, 1, 2, 3, 4, 5])]
        if crowded:
            chunks.insert(0, make_chunk(other, [6, 7, 8, 9]))
        run(executor, *chunks)
    executor.release("r")
    executor.release("o")
    return request.output_token_ids


def test_sampling_depends_on_the_seed_alone(executor: TorchExecutor) -> None:
    hot = SamplingParams(temperature=5.0, seed=1, ignore_eos=True)
    alone = sampled(executor, hot, crowded=False)
    assert sampled(executor, hot, crowded=True) == alone
    assert sampled(executor, replace(hot, seed=2), crowded=False) != alone
    without = replace(hot, seed=None)
    assert sampled(executor, without, crowded=False) == sampled(executor, without, crowded=True)
    narrow = replace(hot, top_k=1)
    assert sampled(executor, narrow, crowded=False) == sampled(executor, GREEDY, crowded=False)
