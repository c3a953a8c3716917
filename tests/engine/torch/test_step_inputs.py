"""The input of a step is right however the steps before it were, and is prepared quickly."""

from __future__ import annotations

import time
from itertools import islice
from random import Random
from typing import NoReturn

import numpy as np
import pytest
import torch
from machine import slowed

from benchmarks.step_inputs import steps
from slosched.core import NO_BLOCK
from slosched.engine.torch import TorchExecutor, load_model
from slosched.engine.torch.block_tables import BlockTables
from slosched.engine.torch.step_inputs import Spans, StepInput, StepInputs

torch.set_num_threads(1)

CPU = torch.device("cpu")


def check(got: StepInput, spans: Spans, block_size: int) -> None:
    """Compare everything that kernels read with what follows from the spans one by one."""
    batch = got.batch
    new, tables = list(spans.num_new_tokens), spans.block_tables
    contexts = [a + b for a, b in zip(new, spans.num_prior_tokens, strict=True)]
    positions = [
        (table, context - num + i)
        for num, context, table in zip(new, contexts, tables, strict=True)
        for i in range(num)
    ]
    assert batch.positions.tolist() == [position for _, position in positions]
    assert batch.slots.tolist() == [
        table[p // block_size] * block_size + p % block_size for table, p in positions
    ]
    assert batch.query_starts.tolist() == [sum(new[:i]) for i in range(len(new) + 1)]
    assert batch.context_starts.tolist() == [sum(contexts[:i]) for i in range(len(new) + 1)]
    assert batch.context_lens.tolist() == batch.num_context_tokens.tolist() == contexts
    assert batch.num_new_tokens.tolist() == new
    assert (batch.max_new_tokens, batch.max_context_tokens) == (max(new), max(contexts))
    for rows in (batch.block_tables.tolist(), batch.host_block_tables.tolist()):
        for row, table, context in zip(rows, tables, contexts, strict=True):
            num_blocks = -(-context // block_size)
            assert row[:num_blocks] == list(table[:num_blocks])
    assert {batch.positions.dtype, batch.slots.dtype} == {torch.int64}
    for tensor in (batch.query_starts, batch.context_starts, batch.context_lens):
        assert tensor.dtype == torch.int32
    assert batch.block_tables.dtype == torch.int32


@pytest.mark.parametrize("grows_by", ["pad", "concatenate"])
def test_tables_for_which_there_was_no_memory_are_written_once_there_is(
    grows_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The array has 64 rows of 64 entries; a longer table, or one of a 65th sequence, grows it."""

    def fail(*_args: object) -> NoReturn:
        raise MemoryError

    tables, num_rows = BlockTables(), 64
    longer = {name: [name] for name in range(num_rows)}
    tables.rows(longer, longer.values())
    longer |= {0: list(range(65))} if grows_by == "pad" else {num_rows: [num_rows]}
    with monkeypatch.context() as scarce:
        scarce.setattr(np, grows_by, fail)
        with pytest.raises(MemoryError):
            tables.rows(longer, longer.values())
    found = np.zeros((len(longer), max(map(len, longer.values()))), np.int32)
    tables.gather(tables.rows(longer, longer.values()), np.zeros(len(longer), np.int64), found)
    for row, blocks in zip(found.tolist(), longer.values(), strict=True):
        assert row[: len(blocks)] == blocks


def test_a_sequence_without_memory_for_its_table_takes_no_row() -> None:
    tables = BlockTables()
    with pytest.raises(MemoryError):
        tables.rows(["endless"], [range(1 << 60)])
    assert set(tables.rows(range(64), [[0]] * 64)) == set(range(64))


def test_tables_that_grow_move_and_change_in_place() -> None:
    """Sequences come and go, are preempted, and have blocks replaced by those of others."""
    rng = Random(0)
    inputs, block_size = StepInputs(4, CPU), 4
    tables: dict[int, list[int]] = {}
    tokens: dict[int, int] = {}
    for step in range(60):
        for name in rng.sample(range(90), 40):
            if name in tables and rng.random() < 0.2:
                inputs.release(name)
                del tables[name], tokens[name]
            elif name in tables and rng.random() < 0.2:
                tables[name], tokens[name] = [], 0  # preempted: another list, other blocks
            elif name in tables and tables[name] and rng.random() < 0.3:
                tables[name][rng.randrange(len(tables[name]))] = rng.randrange(1000)
        names = rng.sample(range(90), rng.randint(1, 80))
        spans, ids, emitting = [], [], []
        for name in names:
            prior = tokens.setdefault(name, 0)
            new = rng.choice((1, 1, 1, rng.randint(1, 400)))
            table = tables.setdefault(name, [])
            while len(table) * block_size < prior + new:
                table.append(rng.randrange(1000))
            spans.append((new, prior, table))
            ids += [step] * new
            emitting.append(len(ids) - 1)
            tokens[name] += new
        got = inputs.fill(names, Spans.of(spans), ids, emitting)
        assert got.token_ids.tolist() == ids
        assert got.emitting.tolist() == emitting
        check(got, Spans.of(spans), block_size)


def test_with_a_window_batches_begin_with_the_first_block_that_is_seen() -> None:
    """Blocks of 4 tokens and a window of 6: after 30 tokens position 25 is the first one seen."""
    inputs = StepInputs(4, CPU, window_tokens=6)
    gone = [NO_BLOCK] * 6
    spans = Spans((3, 1, 2), (30, 2, 0), ([*gone, 7, 8, 9], [5], [4]))
    for _ in range(2):
        batch = inputs.fill(["a", "b", "c"], spans, range(6), []).batch
        assert batch.num_context_tokens.tolist() == [9, 3, 2]
        assert batch.positions.tolist() == [30, 31, 32, 2, 0, 1]
        assert batch.slots.tolist() == [34, 35, 36, 22, 16, 17]
        assert batch.block_tables[0].tolist() == [7, 8, 9]
        assert batch.block_tables[1:, 0].tolist() == [5, 4]
        assert int(batch.block_tables.min()) >= 0, "a kernel might compute the address"


def test_the_same_buffers_serve_every_other_step() -> None:
    inputs = StepInputs(16, CPU)
    places = set()
    for step in range(20):
        got = inputs.fill(["a"], Spans([1], [30 + step], [[3, 1, 2, 5]]), [step], [0])
        places.add((got.token_ids.data_ptr(), got.batch.block_tables.untyped_storage().data_ptr()))
    assert len(places) == 2, "the step before may still be read"


@pytest.mark.slow  # its time differs twofold between machines of one kind
@pytest.mark.cost
def test_a_large_step_is_prepared_in_half_a_millisecond() -> None:
    model = load_model("tiny-random", device="cpu", dtype="float32")
    executor = TorchExecutor(model, num_blocks=8)
    seconds = []
    for chunks in islice(steps(256, 2048, 1000, 60), 60):
        start_s = time.perf_counter()
        executor.prepare(chunks)
        seconds.append(time.perf_counter() - start_s)
        executor.release(chunks[-1].request.request_id)
    assert min(seconds) <= slowed(0.5e-3)
