"""The prefix cache of a KV cache that has none, while there are groups of requests.

The members of a group share the blocks of their prompt.  No other request finds these.
"""

from __future__ import annotations

from collections.abc import Sequence

from slosched.core import Request, ScheduledChunk
from slosched.kv.pool import BlockPool
from slosched.kv.prefix.cache import PrefixCache
from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.host_tier import NoHostTier
from slosched.kv.prefix.keys import group_keys
from slosched.kv.prefix.sharing import SharedBlocks


class GroupPrefixCache(PrefixCache):
    """A prefix cache that knows only the prompts of groups, each for its own members."""

    def __init__(self, block_size: int, pool: BlockPool, tables: dict[str, list[int]]) -> None:
        blocks = SharedBlocks(HashIndex(), block_size, NoHostTier(), group_keys)
        super().__init__(blocks, pool, tables)

    def watch(self, request: Request) -> None:
        if request.group is not None:
            super().watch(request)

    def start(self, request_id: str, num_tokens: int | None = None) -> None:
        if self._blocks.follows(request_id):
            super().start(request_id, num_tokens)

    def note_computed(self, chunks: Sequence[ScheduledChunk]) -> None:
        super().note_computed([chunk for chunk in chunks if chunk.request.group is not None])
