"""A prefix cache whose index is told which requests come and go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from slosched.core import BlockLedger, Request
from slosched.kv.eviction.ranked_index import RankedIndex
from slosched.kv.ledger import SharedLedger
from slosched.kv.prefix.cache import PlannedPrefixCache
from slosched.kv.prefix.host_tier import HostTier, NoHostTier
from slosched.kv.prefix.sharing import SharedBlocks


class RankedBlocks(SharedBlocks):
    """Shared blocks whose index knows of every arrival, release and end."""

    def __init__(self, index: RankedIndex, block_size: int, host: NoHostTier) -> None:
        super().__init__(index, block_size, host)
        self._ranked_index = index
        self._has_host = isinstance(host, HostTier)

    def watch(self, request: Request) -> None:
        super().watch(request)
        self._ranked_index.note_arrived(request, self._known_keys(request.request_id))

    def refresh(self) -> list[tuple[str, int]]:
        refreshed = super().refresh()
        self._note_found(name for name, num_blocks in refreshed if num_blocks)
        return refreshed

    def leave(self, request_id: str, table: Sequence[int], *, at_end: bool) -> Sequence[int]:
        keys, num = self.held(request_id)
        own = super().leave(request_id, table, at_end=at_end)
        if num:
            num_known = self._ranked_index.note_released(self.request(request_id), keys[:num])
            self._matches.changed(keys[num_known:num])  # `refresh` asks who waits for these
            if self._has_host and num_known < num:
                # Who matches more, on the host, is not asked: its match stays as it is.
                self._note_found(self._matches.through(keys[num_known], num_known))
        return own

    def forget(self, request_id: str) -> None:
        if self.follows(request_id):
            self._ranked_index.note_ended(self.request(request_id), self._known_keys(request_id))
        super().forget(request_id)

    def _note_found(self, waiting: Iterable[str]) -> None:
        """Let the index know of waiting requests of which something is cached."""
        self._ranked_index.note_found({name: self._known_keys(name) for name in waiting})

    def _known_keys(self, request_id: str) -> Sequence[object]:
        return self._keys[request_id].known


class RankedPrefixCache(PlannedPrefixCache):
    """A prefix cache that evicts in another order than that in which blocks were left.

    So no policy can foresee what is evicted for a plan in the making: requests hold what they count
    on before any request gets a block.
    """

    def ledger(self) -> BlockLedger:
        return SharedLedger(self._blocks, self._tables)
