"""StepInputs: turns the spans of a step into a PagedBatch, by a few operations on whole arrays."""

from __future__ import annotations

import struct
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from slosched.engine.torch.attention import PagedBatch
from slosched.engine.torch.attention.batch import Int64s
from slosched.engine.torch.block_tables import BlockTables
from slosched.engine.torch.host_buffer import HostBuffer, split_array
from slosched.engine.torch.side_stream import SideStream
from slosched.kv.window import num_unseen_blocks


class Spans(NamedTuple):
    """The tokens [prior, prior + new) of some sequences, and the blocks that hold at least these.

    It has a column for each property, as that is what whole arrays are made of.
    """

    num_new_tokens: Sequence[int]
    num_prior_tokens: Sequence[int]
    block_tables: Sequence[Sequence[int]]

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, Sequence[int]]]) -> Spans:
        """Return the spans of which each row has the new tokens, the prior ones and the blocks."""
        return cls(*zip(*rows, strict=True))

    def padded(self, num_more: int, block: int) -> Spans:
        """Return these and `num_more` sequences of one new token each, all in one block."""
        return Spans(
            (*self.num_new_tokens, *[1] * num_more),
            (*self.num_prior_tokens, *[0] * num_more),
            (*self.block_tables, *[[block]] * num_more),
        )


class Taken(NamedTuple):
    """New tokens that the host does not know yet, and where they lie on the device."""

    places: Sequence[int]
    """Their indices among the new tokens of a step."""
    rows: Sequence[int]
    """The entry of `tokens` that belongs into each place."""
    tokens: Tensor | None
    """Tokens that were drawn before: int64; None if there are no places."""


NOTHING_TAKEN = Taken((), (), None)


class StepInput(NamedTuple):
    """All that a forward pass reads besides the weights and the cache."""

    token_ids: Tensor
    """The new tokens of all sequences: int64 [tokens]."""
    emitting: Tensor
    """The indices of the tokens whose logits are wanted: int64 [emitting tokens]."""
    batch: PagedBatch


class StepInputs:
    """The input buffers of a model, which live as long as it and are filled anew for every step.

    One buffer holds what torch indexes with (int64), the other what kernels read (int32), so that a
    step is two copies to the device.
    """

    def __init__(
        self, block_size: int, device: torch.device, window_tokens: int | None = None
    ) -> None:
        """`window_tokens` is the sliding window of a model in which all layers have one.

        Then the batches begin with the first block that a new token sees: what is before it may
        have been given back.
        """
        self._block_size = block_size
        self._window_tokens = window_tokens
        self._tables = BlockTables()
        self._copies = SideStream(device)
        self._int64s = HostBuffer(torch.int64, device, self._copies)
        self._int32s = HostBuffer(torch.int32, device, self._copies)
        self._copies.wait_for_computation()  # which fills the buffers with zeros

    def fill(
        self,
        names: Iterable[Hashable],
        spans: Spans,
        token_ids: Sequence[int],
        emitting: Sequence[int],
        taken: Taken = NOTHING_TAKEN,
    ) -> StepInput:
        """Return the input of a step of at least one span; it is valid until the next call but one.

        `names` tell the sequences apart, also from step to step. `token_ids` are the new tokens of
        all spans, and `emitting` the indices of those among them whose logits are wanted. The
        tokens that are `taken` replace those of `token_ids` on the device.
        """
        num_new, num_prior = np.array(spans.num_new_tokens), np.array(spans.num_prior_tokens)
        first_blocks = self._num_unseen_blocks(num_prior)
        num_skipped = first_blocks * self._block_size
        num_context = num_new + num_prior - num_skipped
        num_blocks = -(-int(num_context.max()) // self._block_size)
        num_tokens, num_spans = len(token_ids), len(num_new)

        sizes = [num_spans + 1, num_spans + 1, num_spans, num_spans * num_blocks]
        int32s = self._int32s.array(sum(sizes))
        query_starts, context_starts, context_lens, flat_tables = split_array(int32s, *sizes)
        query_starts[0] = context_starts[0] = 0
        np.cumsum(num_new, out=query_starts[1:])
        np.cumsum(num_context, out=context_starts[1:])
        context_lens[:] = num_context
        tables = flat_tables.reshape(num_spans, num_blocks)
        self._tables.gather(self._tables.rows(names, spans.block_tables), first_blocks, out=tables)

        num_taken = len(taken.places)
        long_sizes = [num_tokens, num_tokens, num_tokens, len(emitting), num_taken, num_taken]
        int64s = self._int64s.array(sum(long_sizes))
        ids, positions, slots, rows, places_taken, rows_taken = split_array(int64s, *long_sizes)
        # Numpy would take twice the time to convert a list.
        struct.pack_into(f"{num_tokens}q", ids.data, 0, *token_ids)
        rows[:] = emitting
        places_taken[:], rows_taken[:] = taken.places, taken.rows
        # A token's position is its index among all new tokens, moved by a step for each sequence.
        owners = np.repeat(np.arange(num_spans), num_new)
        positions[:] = np.arange(num_tokens)
        positions += (num_context - query_starts[1:])[owners]
        places, offsets = np.divmod(positions, self._block_size)
        np.multiply(tables[owners, places], self._block_size, out=slots)
        slots += offsets
        positions += num_skipped[owners]

        ids_d, positions_d, slots_d, rows_d, places_taken_d, rows_taken_d = torch.split(
            self._int64s.on_device(sum(long_sizes)), long_sizes
        )
        starts_d, contexts_d, lens_d, tables_d = torch.split(
            self._int32s.on_device(sum(sizes)), sizes
        )
        self._copies.hold_computation()
        if taken.tokens is not None:
            ids_d.index_copy_(0, places_taken_d, taken.tokens.index_select(0, rows_taken_d))
        batch = PagedBatch(
            block_size=self._block_size,
            num_new_tokens=num_new,
            num_context_tokens=num_context,
            host_block_tables=tables,
            positions=positions_d,
            slots=slots_d,
            query_starts=starts_d,
            context_starts=contexts_d,
            context_lens=lens_d,
            block_tables=tables_d.view(num_spans, num_blocks),
        )
        return StepInput(ids_d, rows_d, batch)

    def _num_unseen_blocks(self, num_prior: Int64s) -> Int64s:
        """Return how many first blocks of each sequence none of its new tokens sees."""
        if self._window_tokens is None:
            return np.zeros_like(num_prior)
        window_tokens, size = self._window_tokens, self._block_size
        return np.array([num_unseen_blocks(n, window_tokens, size) for n in num_prior.tolist()])

    def release(self, name: Hashable) -> None:
        """Forget a sequence that has ended."""
        self._tables.release(name)
