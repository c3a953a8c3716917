"""vLLM V0's prefix cache (`--prefix-cache merged`): of blocks that became equal one stays.

Only the policy `vllm_v0` needs it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from slosched.core import BlockLedger
from slosched.core.merged_blocks import BlockNames
from slosched.kv.prefix.cache import PlannedPrefixCache
from slosched.kv.prefix.forecast import Forecast
from slosched.kv.prefix.host_tier import NoHostTier
from slosched.kv.prefix.merged_index import MergedIndex
from slosched.kv.prefix.sharing import SharedBlocks


class MergedBlocks(SharedBlocks):
    """Shared blocks of which equal ones are merged once they are computed."""

    def __init__(self, index: MergedIndex, block_size: int, host: NoHostTier) -> None:
        super().__init__(index, block_size, host)
        self._merged_index = index
        self._num_merged: dict[str, int] = {}
        """First blocks of a table that were found, or that equal no other block any more."""

    def start(self, request_id: str, num_blocks: int | None = None) -> tuple[list[int], list[int]]:
        found = super().start(request_id, num_blocks)
        self._num_merged[request_id] = self._num_indexed[request_id]
        return found

    def leave(self, request_id: str, table: Sequence[int], *, at_end: bool) -> Sequence[int]:
        self._num_merged.pop(request_id, None)
        return super().leave(request_id, table, at_end=at_end)

    def note_computed(self, request_id: str, num_tokens: int, table: list[int]) -> Sequence[int]:
        super().note_computed(request_id, num_tokens, table)
        first = self._num_merged.get(request_id, 0)
        stop = min(self._num_indexed.get(request_id, 0), num_tokens // self.block_size)
        if stop <= first:
            return []
        self._num_merged[request_id] = stop
        own, keys = table[first:stop], self.keys(request_id, stop)[first:stop]
        table[first:stop] = merged = self._merged_index.merge(keys, own)
        return [mine for mine, block in zip(own, merged, strict=True) if mine != block]


class MergedLedger(Forecast, BlockNames):
    """A `Forecast` that also names the content of blocks."""

    def names(self, request_id: str, num_tokens: int) -> Sequence[Hashable]:
        num = num_tokens // self._shared.block_size
        return self._shared.keys(request_id, num)[:num]

    def num_holders(self, name: Hashable) -> int:
        return self._shared.index.num_holders(name)


class MergedPrefixCache(PlannedPrefixCache):
    """A prefix cache whose equal blocks become one, also those of requests that come back."""

    def ledger(self) -> BlockLedger:
        return MergedLedger(self._blocks, self._hash_index, self._tables, self._pool.num_free)

    def note_swapped_out(self, request_id: str) -> None:
        """Follow what stays cached of the request: it need not be copied back."""
        self._blocks.watch_swapped(request_id)
