"""BlockTables: the block tables of all live sequences as one array, of which little changes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

import numpy as np

from slosched.engine.torch.attention.batch import Int32s, Int64s


class Span(Protocol):
    """Tokens [prior, prior + new) of a sequence, and the blocks that hold at least these."""

    @property
    def num_new_tokens(self) -> int: ...

    @property
    def num_prior_tokens(self) -> int: ...

    @property
    def block_table(self) -> Sequence[int]: ...


class BlockTables:
    """A row of block numbers for each sequence that has taken part in a step and has not ended.

    A decode's table is the same as in the step before, fifteen times out of sixteen. Comparing two
    lists of integers is ten times as fast as converting one, so only what has changed is converted.
    """

    def __init__(self) -> None:
        self._array: Int32s = np.zeros((64, 64), np.int32)
        self._free_rows = list(range(64))
        self._known: dict[Hashable, tuple[int, list[int]]] = {}
        """The row of each sequence, and the table that is written there."""

    def rows(self, names: Iterable[Hashable], spans: Iterable[Span]) -> list[int]:
        """Write the tables that have changed, and return the row of each sequence."""
        found = []
        known = self._known
        for name, span in zip(names, spans, strict=True):
            entry = known.get(name)
            if entry is None or entry[1] != span.block_table:
                entry = self._write(name, span.block_table)
            found.append(entry[0])
        return found

    def gather(self, rows: Sequence[int], num_blocks: int, first_blocks: Int64s) -> Int32s:
        """Return `num_blocks` entries of each row, from its first block on: [rows, num_blocks].

        Entries behind the end of a table are blocks that it, or a sequence that has ended, had.
        """
        if not first_blocks.any():
            tables: Int32s = self._array[rows, :num_blocks]
            return tables
        # A shorter table ends with its last entries again, in place of those behind the array.
        places = first_blocks[:, None] + np.arange(num_blocks)
        np.minimum(places, self._array.shape[1] - 1, out=places)
        moved: Int32s = self._array[np.asarray(rows)[:, None], places]
        return moved

    def release(self, name: Hashable) -> None:
        """Forget a sequence that has ended."""
        if (entry := self._known.pop(name, None)) is not None:
            self._free_rows.append(entry[0])

    def _write(self, name: Hashable, table: Sequence[int]) -> tuple[int, list[int]]:
        num_rows, width = self._array.shape
        if name not in self._known and not self._free_rows:
            self._free_rows = list(range(num_rows, 2 * num_rows))
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        if len(table) > width:
            more = max(len(table) - width, width)
            self._array = np.pad(self._array, ((0, 0), (0, more)))
        row = self._known[name][0] if name in self._known else self._free_rows.pop()
        # Nobody reads an entry without a block, but kernels may compute its address.
        np.maximum(table, 0, out=self._array[row, : len(table)], casting="unsafe")
        entry = self._known[name] = row, list(table)
        return entry
