"""A pool of numbered KV blocks."""

from __future__ import annotations

from collections.abc import Iterable

from slosched.core import SloschedError


class OutOfBlocksError(SloschedError):
    """An attempt to take more blocks than are free."""


class BlockPool:
    """A pool of block numbers.  Those freed last are taken first, as their memory is warmest."""

    __slots__ = ("_free", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"a block pool cannot have {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def free_blocks(self) -> frozenset[int]:
        return frozenset(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks; raise OutOfBlocksError and take nothing if there are fewer."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} KV blocks wanted, {len(self._free)} are free")
        if count == 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        del self._free[-count:]
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        self._free.extend(blocks)
