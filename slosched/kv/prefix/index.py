"""Full KV blocks of known content, by key: those that are held, and those that may be evicted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from slosched.kv.prefix.hash_index import HashIndex
from slosched.kv.prefix.keys import Key
from slosched.kv.prefix.merged_index import MergedIndex
from slosched.kv.prefix.radix_index import RadixIndex


class PrefixIndex(Protocol):
    """Which block holds which content, how many requests hold it, and which goes first.

    It is closed under prefixes: who holds a block holds all before it, and a block is evicted
    only after those that follow it.  So of a request's keys a first part is cached, and a first
    part of that is held.
    """

    @property
    def num_evictable(self) -> int:
        """Blocks that nobody holds."""

    def __contains__(self, key: Key) -> bool: ...

    def num_holders(self, key: Key) -> int:
        """Requests that hold a block of this key; 0 if it may be evicted or is not there."""

    def block(self, key: Key) -> int | None:
        """The one that is found."""

    def twins_in(self, keys: Sequence[Key], num: int) -> Iterator[tuple[int, Mapping[int, int]]]:
        """Of the first `num` keys those that have several blocks: its place, the holders of each.

        Found is the first of them.
        """

    def lock(self, keys: Sequence[Key]) -> list[int]:
        """One more holder for the blocks of a prefix; which they are.  All must be there."""

    def unlock(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """One holder less for each block of a prefix, which stays cached."""

    def requeue(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        """Those of a prefix that nobody holds: as if they had been left just now."""

    def insert(self, keys: Sequence[Key], num_held: int, blocks: Sequence[int]) -> list[int]:
        """Who holds the first `num_held` has computed the others, into `blocks`, and holds them.

        Returned are the blocks that are to be held: where one of the same content takes the place
        of its own, that is given back.
        """

    def evict(self, count: int) -> list[tuple[Key, int]]:
        """Forget so many of the blocks that nobody holds, or more if they go together.

        In an order in which each comes after those that follow it.
        """

    def discard(self, blocks: Sequence[int]) -> list[tuple[Key, int]]:
        """Forget those of the blocks that nobody holds: what they hold was never computed."""

    def blocks(self) -> dict[int, int]:
        """Every block, and how many hold it: for checks."""


class PrefixCaching(StrEnum):
    """Whether prompts are looked up in the KV cache, and by what."""

    OFF = "off"
    HASH = "hash"
    MERGED = "merged"
    RADIX = "radix"

    def new_index(self) -> PrefixIndex | None:
        """An empty one."""
        match self:
            case PrefixCaching.OFF:
                return None
            case PrefixCaching.HASH:
                return HashIndex()
            case PrefixCaching.MERGED:
                return MergedIndex()
            case PrefixCaching.RADIX:
                return RadixIndex()
