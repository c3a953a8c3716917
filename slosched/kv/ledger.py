"""What a plan in the making does to the free blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence

from slosched.kv.keys import Key
from slosched.kv.sharing import SharedBlocks


class OwnBlocks:
    """Without a prefix cache: each block is one request's own.  A `core.BlockLedger`."""

    __slots__ = ("leave", "num_ready_blocks")

    def __init__(self, num_held_blocks: Callable[[str], int]) -> None:
        self.num_ready_blocks = num_held_blocks
        self.leave = num_held_blocks

    def num_blocks_to_load(self, request_id: str) -> int:  # noqa: ARG002  # nothing is cached
        return 0

    def start(self, request_id: str) -> None:
        """It finds nothing in the cache."""


class SharedLedger:
    """With one: a block is free only when the last one who holds it leaves.  A `core.BlockLedger`.

    Who holds a block holds all before it; so the held part of a prefix is found by bisection.
    """

    def __init__(self, shared: SharedBlocks, num_held_blocks: Callable[[str], int]) -> None:
        self._shared = shared
        self._num_held_blocks = num_held_blocks
        self._num_holders = shared.index.num_holders
        self._more: Counter[Key] = Counter()
        """Holders by key that the plan adds, or takes away."""

    def num_ready_blocks(self, request_id: str) -> int:
        held = self._num_held_blocks(request_id)
        return held or self._num_held(*self._shared.matched(request_id))

    def num_blocks_to_load(self, request_id: str) -> int:
        keys, num = self._shared.matched(request_id)
        return num - self._shared.num_on_device(keys, num)

    def start(self, request_id: str) -> None:
        keys, num = self._shared.matched(request_id)
        self._more.update(keys[: self._shared.num_on_device(keys, num)])

    def leave(self, request_id: str) -> int:
        keys, num = self._shared.held(request_id)
        self._more.subtract(keys[:num])
        return self._num_held_blocks(request_id) - self._num_held(keys, num)

    def _num_held(self, keys: Sequence[Key], num: int) -> int:
        """How many of the first `num` blocks somebody would hold."""
        if not num:
            return 0
        holders, more = self._num_holders, self._more
        return bisect_left(keys, True, hi=num, key=lambda key: holders(key) + more.get(key, 0) <= 0)
