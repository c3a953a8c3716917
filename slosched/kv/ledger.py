"""Ledgers: the effect of a plan in the making on the free blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from slosched.kv.prefix.keys import Key
from slosched.kv.prefix.sharing import SharedBlocks


class HoldsAll:
    """The part of a `core.BlockLedger` where a request holds all its blocks until it ends."""

    __slots__ = ()

    def num_spared_blocks(self, request_id: str, num_tokens: int) -> int:  # noqa: ARG002
        """Return 0: all blocks are held at once."""
        return 0


class FoundBefore(HoldsAll):
    """The part of a `core.BlockLedger` where what is cached is known before the plan is made."""

    __slots__ = ()

    def num_blocks_to_load(self, request_id: str) -> int:  # noqa: ARG002
        """Return 0: nothing is on the host."""
        return 0

    def find(
        self,
        request_id: str,  # noqa: ARG002
        planned: Mapping[str, int],  # noqa: ARG002
        num_lent: int = 0,  # noqa: ARG002
    ) -> int | None:
        """Return None: nothing more is found while the plan is made."""
        return None


class OwnBlocks(FoundBefore):
    """A `core.BlockLedger` without prefix cache: each block belongs to one request."""

    __slots__ = ("_tables",)

    def __init__(self, tables: Mapping[str, Sequence[int]]) -> None:
        self._tables = tables

    def num_ready_blocks(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return len(table) if table else 0

    leave = num_ready_blocks

    def start(self, request_id: str) -> None:
        """Note that a request starts, which finds nothing in a cache."""


class SharedLedger(HoldsAll):
    """A `core.BlockLedger` with a prefix cache: a block is free once its last holder leaves.

    A request that holds a block holds all blocks before it.  So the part of a prefix that requests
    hold is found by bisection.  The few keys that have several blocks are looked at one by one.
    """

    def __init__(self, shared: SharedBlocks, tables: Mapping[str, list[int]]) -> None:
        self._shared = shared
        self._tables = tables
        self._num_holders = shared.index.num_holders
        self._more: Counter[Key] = Counter()
        """Holders by key that the plan adds, or takes away where negative."""
        self._more_of: Counter[int] = Counter()
        """Holders by block that the plan adds or takes away."""

    def num_ready_blocks(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return len(table) if table else self._num_found_held(*self._found_by(request_id))

    def num_blocks_to_load(self, request_id: str) -> int:
        keys, num = self._shared.matched(request_id)
        return num - self._shared.num_on_device(keys, num)

    def start(self, request_id: str) -> None:
        keys, num = self._found_by(request_id)
        keys = keys[: self._shared.num_on_device(keys, num)]
        self._more.update(keys)
        found = map(self._block, keys)
        self._more_of.update(block for block in found if block is not None)

    def leave(self, request_id: str) -> int:
        table = self._tables.get(request_id, [])
        keys, num = self._shared.held(request_id)
        self._more.subtract(keys[:num])
        self._more_of.subtract(table[:num])
        num_held = self._num_with_holders(keys, num)
        return (
            len(table)
            - num_held
            + sum(
                not twins[table[place]] + self._more_of[table[place]]
                for place, twins in self._shared.index.twins_in(keys, num_held)
            )
        )

    def find(
        self,
        request_id: str,  # noqa: ARG002
        planned: Mapping[str, int],  # noqa: ARG002
        num_lent: int = 0,  # noqa: ARG002
    ) -> int | None:
        """Return None: new requests hold what they find before any request gets a block."""
        return None

    def _found_by(self, request_id: str) -> tuple[Sequence[Key], int]:
        """Return the keys of a waiting request and the number of blocks that it finds."""
        return self._shared.matched(request_id)

    def _block(self, key: Key) -> int | None:
        """Return the block that a request with this key would find."""
        return self._shared.index.block(key)

    def _num_found_held(self, keys: Sequence[Key], num: int) -> int:
        """Return how many of the blocks found for the first `num` keys would have a holder."""
        num_held = self._num_with_holders(keys, num)
        for _, twins in self._shared.index.twins_in(keys, num_held):
            found = next(iter(twins))
            num_held -= not twins[found] + self._more_of[found]
        return num_held

    def _num_with_holders(self, keys: Sequence[Key], num: int) -> int:
        """Return how many of the first `num` keys would have a block with a holder."""
        if not num:
            return 0
        holders, more = self._num_holders, self._more
        return bisect_left(keys, True, hi=num, key=lambda key: holders(key) + more.get(key, 0) <= 0)
