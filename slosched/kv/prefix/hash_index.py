"""vLLM's index of a prefix cache: blocks by key, and those that nobody holds in a queue."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from slosched.kv.prefix.keys import Key


class HashIndex:
    """A `PrefixIndex` that evicts what was left first, and the tail of a request before its head.

    A block is found as soon as a step is planned that fills it: steps run in the order in which
    they were planned, and in each of them every layer's keys are written before any are read.  Two
    requests that compute the same content keep both blocks, so that no table ever changes, and
    others find the older one.

    Source: vLLM 0.32 and 0.33, `v1/core/block_pool.py`.
    """

    def __init__(self) -> None:
        self._block: dict[Key, int] = {}
        """The block that requests find, by key."""
        self._holders: dict[Key, int] = {}
        """Number of holders, for keys that have any."""
        self._twins: dict[Key, dict[int, int]] = {}
        self._place: dict[Key, int] = {}
        """For keys with several blocks: the number of blocks before them in every table."""
        self._evictable: OrderedDict[int, Key] = OrderedDict()
        """Keys by block that no request holds; the next one to be evicted stands first."""

    @property
    def num_evictable(self) -> int:
        return len(self._evictable)

    @property
    def twins(self) -> Mapping[Key, Mapping[int, int]]:
        """Return the holders by block, the oldest first, of keys that have several blocks."""
        return self._twins

    def __contains__(self, key: Key) -> bool:
        return key in self._block

    def num_holders(self, key: Key) -> int:
        return self._holders.get(key, 0)

    def num_holders_of(self, key: Key, block: int) -> int:
        """Return the number of requests that hold this block of the key."""
        twins = self._twins.get(key)
        return self._holders.get(key, 0) if twins is None else twins[block]

    def block(self, key: Key) -> int | None:
        return self._block.get(key)

    def twins_in(self, keys: Sequence[Key], num: int) -> Iterator[tuple[int, Mapping[int, int]]]:
        if num < len(self._twins):
            for place in range(num):
                if keys[place] in self._twins:
                    yield place, self._twins[keys[place]]
            return
        for key, twins in self._twins.items():
            place = self._place[key]
            if place < num and keys[place] == key:
                yield place, twins

    def lock(self, keys: Sequence[Key]) -> list[int]:
        holders, evictable, twins = self._holders, self._evictable, self._twins
        blocks = [self._block[key] for key in keys]
        for key, block in zip(keys, blocks, strict=True):
            is_idle = key not in holders
            if key in twins:
                is_idle = not twins[key][block]
                twins[key][block] += 1
            holders[key] = holders.get(key, 0) + 1
            if is_idle:
                del evictable[block]
        return blocks

    def unlock(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        holders, evictable, twins = self._holders, self._evictable, self._twins
        for key, block in zip(reversed(keys), reversed(blocks), strict=True):
            num_left = holders[key] - 1
            if num_left:
                holders[key] = num_left
            else:
                del holders[key]
            if key in twins:
                num_left = twins[key][block] = twins[key][block] - 1
            if not num_left:
                evictable[block] = key

    def requeue(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:
        evictable = self._evictable
        for key, block in zip(reversed(keys), reversed(blocks), strict=True):
            if evictable.get(block) == key:
                evictable.move_to_end(block)

    def insert(self, keys: Sequence[Key], num_held: int, blocks: Sequence[int]) -> list[int]:
        own = list(blocks)
        for place, (key, block) in enumerate(zip(keys[num_held:], own, strict=True), num_held):
            found, num_holders = self._block.setdefault(key, block), self._holders.get(key, 0)
            if found != block:
                self._twins.setdefault(key, {found: num_holders})[block] = 1
                self._place[key] = place
            self._holders[key] = num_holders + 1
        return own

    def evict(self, count: int) -> list[tuple[Key, int]]:
        gone = []
        for _ in range(count):
            block, key = self._evictable.popitem(last=False)
            self._drop(key, block)
            gone.append((key, block))
        return gone

    def evictable(self) -> Iterator[tuple[Key, int]]:
        """Yield the blocks that no request holds, the next one to be evicted first."""
        return ((key, block) for block, key in self._evictable.items())

    def discard(self, blocks: Sequence[int]) -> list[tuple[Key, int]]:
        gone = []
        for block in blocks:
            key = self._evictable.pop(block, None)
            if key is not None:
                self._drop(key, block)
                gone.append((key, block))
        return gone

    def blocks(self) -> dict[int, int]:
        held = {block: self.num_holders(key) for key, block in self._block.items()}
        for twins in self._twins.values():
            held |= twins
        return held

    def _drop(self, key: Key, block: int) -> None:
        twins = self._twins.get(key)
        if twins is None:
            del self._block[key]
            return
        del twins[block]
        self._block[key] = next(iter(twins))
        if len(twins) == 1:
            del self._twins[key], self._place[key]
