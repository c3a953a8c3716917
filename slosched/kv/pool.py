"""A pool of numbered KV blocks."""

from __future__ import annotations

from collections.abc import Iterable

from slosched.core import SloschedError


class OutOfBlocksError(SloschedError):
    """An attempt to take more blocks than are free."""


class BlockPool:
    """A pool of block numbers.  Those freed last are taken first, as their memory is warmest."""

    __slots__ = ("_left", "_num_used", "num_blocks", "num_free")

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise ValueError(f"a block pool cannot have {num_blocks} blocks")
        self.num_blocks = num_blocks
        self._left: list[int] = []
        """Free blocks that were taken before, the last freed at the end."""
        self.num_free = num_blocks
        self._num_used = 0
        """The first blocks, which have been taken at least once.  A large pool thus costs nothing
        before it is used, of which a fleet has a thousand."""

    @property
    def free_blocks(self) -> frozenset[int]:
        return frozenset(self._left) | frozenset(range(self._num_used, self.num_blocks))

    def take(self, count: int) -> list[int]:
        """Return `count` blocks; raise OutOfBlocksError and take nothing if there are fewer."""
        left, num_used = self._left, self._num_used
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.num_free} are free")
        if count == 0:
            return []
        self.num_free -= count
        num_new = count - len(left)
        taken = left[-count:]
        taken.reverse()
        del left[-count:]
        if num_new > 0:
            self._num_used = num_used + num_new
            taken.extend(range(num_used, self._num_used))
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        self._left.extend(blocks)
        self.num_free = len(self._left) + self.num_blocks - self._num_used
