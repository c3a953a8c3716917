"""What a plan in the making does to the free blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence

from slosched.kv.prefix.keys import Key
from slosched.kv.prefix.sharing import SharedBlocks


class FoundBefore:
    """The part of a `core.BlockLedger` for which requests know before the plan what is cached."""

    __slots__ = ()

    def num_blocks_to_load(self, request_id: str) -> int:  # noqa: ARG002
        """Nothing lies on the host."""
        return 0

    def find(
        self,
        request_id: str,  # noqa: ARG002
        planned: Mapping[str, int],  # noqa: ARG002
        num_lent: int = 0,  # noqa: ARG002
    ) -> int | None:
        """Nothing more is found while the plan is made."""
        return None


class OwnBlocks(FoundBefore):
    """Without a prefix cache: each block is one request's own.  A `core.BlockLedger`."""

    __slots__ = ("_tables",)

    def __init__(self, tables: Mapping[str, Sequence[int]]) -> None:
        self._tables = tables

    def num_ready_blocks(self, request_id: str) -> int:
        table = self._tables.get(request_id)
        return len(table) if table else 0

    leave = num_ready_blocks

    def start(self, request_id: str) -> None:
        """It finds nothing in the cache."""


class SharedLedger:
    """With one: a block is free only when the last one who holds it leaves.  A `core.BlockLedger`.

    Who holds a block holds all before it; so the part of a prefix of which somebody holds a block
    is found by bisection.  Of the few keys that have several blocks each is looked at.
    """

    def __init__(self, shared: SharedBlocks, tables: Mapping[str, list[int]]) -> None:
        self._shared = shared
        self._tables = tables
        self._num_holders = shared.index.num_holders
        self._more: Counter[Key] = Counter()
        """Holders by key that the plan adds, or takes away."""
        self._more_of: Counter[int] = Counter()
        """The same by block."""

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
        """What new requests find is held before anybody gets a block."""
        return None

    def _found_by(self, request_id: str) -> tuple[Sequence[Key], int]:
        """Keys of a waiting request, and of how many of them it finds the blocks."""
        return self._shared.matched(request_id)

    def _block(self, key: Key) -> int | None:
        """That is found."""
        return self._shared.index.block(key)

    def _num_found_held(self, keys: Sequence[Key], num: int) -> int:
        """How many of the blocks that are found of the first `num` keys somebody would hold."""
        num_held = self._num_with_holders(keys, num)
        for _, twins in self._shared.index.twins_in(keys, num_held):
            found = next(iter(twins))
            num_held -= not twins[found] + self._more_of[found]
        return num_held

    def _num_with_holders(self, keys: Sequence[Key], num: int) -> int:
        """Of how many of the first `num` keys somebody would hold a block."""
        if not num:
            return 0
        holders, more = self._num_holders, self._more
        return bisect_left(keys, True, hi=num, key=lambda key: holders(key) + more.get(key, 0) <= 0)
