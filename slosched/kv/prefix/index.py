"""Full KV blocks of known content by key: held ones, and those that may be evicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from slosched.kv.eviction.order import Known
from slosched.kv.eviction.orders import Eviction
from slosched.kv.prefix.keys import Key
from slosched.kv.prefix.merged_index import MergedIndex
from slosched.kv.prefix.radix_index import RadixIndex


class PrefixIndex(Protocol):
    """The content of blocks, the number of requests that hold each, and the order of eviction.

    It is closed under prefixes: a request that holds a block holds all blocks before it, and a
    block is evicted only after those that follow it.  So a first part of a request's keys is
    cached, and a first part of that part is held.
    """

    @property
    def num_evictable(self) -> int:
        """Return the number of cached blocks that no request holds."""

    def __contains__(self, key: Key) -> bool: ...

    def num_holders(self, key: Key) -> int:
        """Return the number of requests that hold a block of this key, 0 if it is not cached."""

    def block(self, key: Key) -> int | None:
        """Return the block that a request with this key finds, or None."""

    def twins_in(self, keys: Sequence[Key], num: int) -> Iterator[tuple[int, Mapping[int, int]]]:
        """Yield those of the first `num` keys that have several blocks.

        Each comes as its place among the keys and the number of holders by block.  Requests find
        the first of these blocks.
        """

    def lock(self, keys: Sequence[Key]) -> list[int]:
        """Add a holder to the blocks of a prefix, all of which must be cached, and return them."""

    def unlock(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """Remove a holder from each block of a prefix; the blocks stay cached."""

    def requeue(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """Treat the blocks of a prefix that no request holds as if they had been left just now."""

    def insert(self, keys: Sequence[Key], num_held: int, blocks: Sequence[int]) -> list[int]:
        """Enter what a request that holds the first `num_held` keys has computed into `blocks`.

        Return the blocks that it holds for the other keys.  A block that differs from its own had
        the same content already, and the caller gives its own block back.
        """

    def evict(self, count: int) -> list[tuple[Key, int]]:
        """Forget `count` blocks that no request holds, or more if they go together.

        Return them with their keys, each after those that follow it.
        """

    def discard(self, blocks: Sequence[int]) -> list[tuple[Key, int]]:
        """Forget and return those of `blocks`, never computed, that no request holds."""

    def blocks(self) -> dict[int, int]:
        """Return every block with the number of requests that hold it, for checks."""


class PrefixCaching(StrEnum):
    """The kind of prefix cache, if any."""

    OFF = "off"
    HASH = "hash"
    MERGED = "merged"
    RADIX = "radix"

    def new_index(
        self, eviction: Eviction = Eviction.LRU, known: Known | None = None
    ) -> PrefixIndex | None:
        """Return an empty index of this kind, or None for no prefix cache.

        All orders but `lru` need `known`.  Raise ValueError for one that this kind does not have.
        """
        self.check(eviction)
        match self:
            case PrefixCaching.OFF:
                return None
            case PrefixCaching.HASH:
                return eviction.new_index(known or Known(num_blocks=1, block_size=1))
            case PrefixCaching.MERGED:
                return MergedIndex()
            case PrefixCaching.RADIX:
                return RadixIndex()

    def check(self, eviction: Eviction) -> None:
        """Raise ValueError if this kind of prefix cache does not have an order of eviction."""
        if eviction is not Eviction.LRU and self is not PrefixCaching.HASH:
            raise ValueError(
                f"only the prefix cache hash evicts in the order {eviction}, not {self}: choose "
                "--prefix-cache hash, or --prefix-cache-eviction lru"
            )
