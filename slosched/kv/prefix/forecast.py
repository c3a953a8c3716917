"""A forecast of the prefix cache: its content when the turn of a request in a plan comes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from slosched.core import RequestStatus
from slosched.kv.ledger import SharedLedger
from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.keys import Key
from slosched.kv.prefix.sharing import SharedBlocks


class Forecast(SharedLedger):
    """A ledger that follows the plan in its order, as vLLM allocates blocks while it plans.

    A planned request takes blocks, for which others are evicted, and requests that are planned
    after it find what it computes.  Requests leave before any request is looked for.
    """

    def __init__(
        self,
        shared: SharedBlocks,
        index: HashIndex,
        tables: Mapping[str, list[int]],
        num_empty_blocks: int,
    ) -> None:
        super().__init__(shared, tables)
        self._index = index
        self._num_empty = num_empty_blocks
        self._num_entered = self._num_lent = 0
        """Requests of the plan so far, and blocks that were lent beside it."""
        self._found: dict[str, int] = {}
        """Blocks found, by request that was looked for."""
        self._computed: set[Key] = set()
        """Keys of what the planned requests compute."""
        self._evicted: set[int] = set()
        self._left: list[int] = []
        """Blocks with content that lost their last holder, in that order."""
        self._to_evict = self._in_order()

    def find(self, request_id: str, planned: Mapping[str, int], num_lent: int = 0) -> int:
        """See `core.BlockLedger`.  O(log), and O(1) for each request planned since then."""
        self._take(num_lent - self._num_lent)
        self._num_lent = num_lent
        for name, num_new in islice(planned.items(), self._num_entered, None):
            self._enter(name, num_new)
        self._num_entered = len(planned)
        keys, num = self._shared.matched(request_id)
        if self._evicted:
            num = bisect_left(keys, True, hi=num, key=lambda key: self._block(key) is None)
        most = self._shared.most_blocks(request_id)
        while num < most:
            keys = self._shared.keys(request_id, num + 1)
            if len(keys) <= num or keys[num] not in self._computed:
                break
            num += 1
        self._found[request_id] = num
        return num * self._shared.block_size

    def leave(self, request_id: str) -> int:
        table = self._tables.get(request_id, [])
        num_freed = super().leave(request_id)
        keys, num = self._shared.held(request_id)
        pairs = list(zip(keys[:num], table, strict=False))
        self._left += [b for key, b in reversed(pairs) if not self._num_holders_of(key, b)]
        self._num_empty += len(table) - num
        return num_freed

    def _found_by(self, request_id: str) -> tuple[Sequence[Key], int]:
        num = self._found.get(request_id)
        if num is None:
            return super()._found_by(request_id)
        return self._shared.keys(request_id, num), num

    def _block(self, key: Key) -> int | None:
        for block in self._index.twins.get(key, ()):
            if block not in self._evicted:
                return block
        found = super()._block(key)
        return None if found in self._evicted else found

    def _num_found_held(self, keys: Sequence[Key], num: int) -> int:
        if not (self._index.twins or self._computed):
            return super()._num_found_held(keys, num)
        return sum(map(self._is_found_held, keys[: self._num_with_holders(keys, num)]))

    def _is_found_held(self, key: Key) -> bool:
        block = self._block(key)
        return block is None or self._num_holders_of(key, block) > 0

    def _num_holders_of(self, key: Key, block: int) -> int:
        return self._index.num_holders_of(key, block) + self._more_of[block]

    def _enter(self, request_id: str, num_new: int) -> None:
        """Note that a planned request takes its blocks and computes their content."""
        shared = self._shared
        request = shared.request(request_id)
        prior = request.num_computed_tokens
        if request.status is RequestStatus.RUNNING:
            _, num_known = shared.held(request_id)
            num_held = len(self._tables.get(request_id, ()))
        else:
            _, num_known = self._found_by(request_id)
            num_held = num_known
            if request.status is RequestStatus.WAITING:
                prior = num_known * shared.block_size
        after = prior + num_new
        self._take(max(0, -(-after // shared.block_size) - num_held))
        after = min(after, request.num_tokens - request.num_output_placeholders)
        if (num_full := after // shared.block_size) > num_known:
            keys = shared.keys(request_id, num_full)[num_known:num_full]
            self._more.update(keys)
            self._computed.update(keys)

    def _take(self, count: int) -> None:
        """Take empty blocks first, then evict those that were left longest ago."""
        self._num_empty -= count
        while self._num_empty < 0:
            self._evicted.add(next(self._to_evict))
            self._num_empty += 1

    def _in_order(self) -> Iterator[int]:
        """Yield blocks in the order of eviction, without those that the plan holds by then."""
        for _, block in self._index.evictable():
            if self._more_of[block] <= 0:
                yield block
        for block in self._left:
            if self._more_of[block] <= 0:
                yield block
