"""BlockTables: the block tables of all live sequences as one array, of which little changes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from slosched.engine.torch.attention.batch import Int32s, Int64s


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

    def rows(self, names: Iterable[Hashable], tables: Iterable[Sequence[int]]) -> list[int]:
        """Write the tables that have changed, and return the row of each sequence."""
        found = []
        known = self._known
        for name, table in zip(names, tables, strict=True):
            entry = known.get(name)
            if entry is None or entry[1] != table:
                entry = self._write(name, table)
            found.append(entry[0])
        return found

    def gather(self, rows: Sequence[int], first_blocks: Int64s, out: Int32s) -> None:
        """Fill `out` [rows, entries] with entries of these rows, each from its first block on.

        Entries behind the end of a table are blocks that it, or a sequence that has ended, had.
        """
        num_blocks = out.shape[1]
        if not first_blocks.any():
            # Other modes than "raise" write to `out` without a copy; all rows are there.
            self._array[:, :num_blocks].take(rows, axis=0, out=out, mode="clip")
            return
        # A shorter table ends with its last entries again, in place of those behind the array.
        places = first_blocks[:, None] + np.arange(num_blocks)
        np.minimum(places, self._array.shape[1] - 1, out=places)
        out[:] = self._array[np.asarray(rows)[:, None], places]

    def release(self, name: Hashable) -> None:
        """Forget a sequence that has ended."""
        if (entry := self._known.pop(name, None)) is not None:
            self._free_rows.append(entry[0])

    def _write(self, name: Hashable, table: Sequence[int]) -> tuple[int, list[int]]:
        blocks = list(table)  # from here on `table`, which may grow in another thread, is not read
        known = self._known.get(name)
        self._make_room(len(blocks), is_new=known is None)
        row, written = known or (self._free_rows.pop(), [])
        kept = len(written)
        if blocks[:kept] != written:  # it did not only grow
            kept = 0
        # Nobody reads an entry without a block, but kernels may compute its address.
        self._array[row, kept : len(blocks)] = [max(block, 0) for block in blocks[kept:]]
        entry = self._known[name] = row, blocks
        return entry

    def _make_room(self, num_blocks: int, *, is_new: bool) -> None:
        """Make rows of at least `num_blocks` entries, and a free row for a sequence that `is_new`.

        Where memory does not suffice for that, nothing changes.
        """
        num_rows, width = self._array.shape
        if is_new and not self._free_rows:
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
            self._free_rows = list(range(num_rows, 2 * num_rows))
        if num_blocks > width:
            more = max(num_blocks - width, width)
            self._array = np.pad(self._array, ((0, 0), (0, more)))
