"""Full KV blocks of known content, by key: those that are held, and those that may be evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from slosched.kv.keys import Key
from slosched.kv.radix_index import RadixIndex


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
        """Requests that hold the block; 0 if it may be evicted or is not there."""

    def lock(self, keys: Sequence[Key]) -> list[int]:
        """One more holder for the blocks of a prefix; which they are.  All must be there."""

    def unlock(self, keys: Sequence[Key]) -> None:
        """One holder less for each block of a prefix, which stays cached."""

    def requeue(self, keys: Sequence[Key]) -> None:
        """Those of a prefix that nobody holds: as if they had been left just now."""

    def insert(self, keys: Sequence[Key], num_held: int, blocks: Sequence[int]) -> list[int]:
        """Who holds the first `num_held` has computed the others, into `blocks`, and holds them.

        What is cached already is not cached twice: returned are the blocks that are to be held,
        and whoever has another of the same content gives it back.
        """

    def evict(self, count: int) -> list[tuple[Key, int]]:
        """Forget so many of the blocks that nobody holds, or more if they go together.

        In an order in which each comes after those that follow it.
        """

    def blocks(self) -> dict[int, int]:
        """Every block, and how many hold it: for checks."""


class PrefixCaching(StrEnum):
    """Whether prompts are looked up in the KV cache, and by what."""

    OFF = "off"
    HASH = "hash"
    RADIX = "radix"

    def new_index(self) -> PrefixIndex | None:
        """An empty one."""
        match self:
            case PrefixCaching.OFF:
                return None
            case PrefixCaching.HASH:
                return HashIndex()
            case PrefixCaching.RADIX:
                return RadixIndex()


class HashIndex:
    """vLLM's: a dict of keys; evicted is what was left first, of one request its tail first.

    Unlike vLLM V1 it evicts no content while there are blocks without any, and keeps one block of
    each content, as vLLM V0 does.
    """

    def __init__(self) -> None:
        self._block: dict[Key, int] = {}
        self._holders: dict[Key, int] = {}
        """Of blocks that are held."""
        self._evictable: OrderedDict[Key, None] = OrderedDict()
        """The next one to go stands first."""

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    def __contains__(self, key: Key) -> bool:
        return key in self._block

    def num_holders(self, key: Key) -> int:
        return self._holders.get(key, 0)

    def lock(self, keys: Sequence[Key]) -> list[int]:
        holders, evictable, block = self._holders, self._evictable, self._block
        for key in keys:
            if key in holders:
                holders[key] += 1
            else:
                holders[key] = 1
                del evictable[key]
        return [block[key] for key in keys]

    def unlock(self, keys: Sequence[Key]) -> None:
        holders, evictable = self._holders, self._evictable
        for key in reversed(keys):
            if holders[key] > 1:
                holders[key] -= 1
            else:
                del holders[key]
                evictable[key] = None

    def requeue(self, keys: Sequence[Key]) -> None:
        evictable = self._evictable
        for key in reversed(keys):
            if key in evictable:
                evictable.move_to_end(key)

    def insert(self, keys: Sequence[Key], num_held: int, blocks: Sequence[int]) -> list[int]:
        end = num_held
        while end < len(keys) and keys[end] in self._block:
            end += 1
        known, new, in_new = self.lock(keys[num_held:end]), keys[end:], blocks[end - num_held :]
        self._block.update(zip(new, in_new, strict=True))
        self._holders.update(dict.fromkeys(new, 1))
        return [*known, *in_new]

    def evict(self, count: int) -> list[tuple[Key, int]]:
        gone = []
        for _ in range(count):
            key, _ = self._evictable.popitem(last=False)
            gone.append((key, self._block.pop(key)))
        return gone

    def blocks(self) -> dict[int, int]:
        return {block: self.num_holders(key) for key, block in self._block.items()}
