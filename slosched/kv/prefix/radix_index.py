"""SGLang's radix tree as the index of a prefix cache: it evicts whole leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import cast

from slosched.kv.prefix.keys import Key
from slosched.kv.prefix.radix import Node, RadixTree


class RadixIndex:
    """A `PrefixIndex` that evicts the least recently used leaf of a radix tree.

    The block keys of a request are a path of the tree, one page each.  A prefix counts as used when
    a request starts with it, computes more of it or leaves it, but not while a request that would
    match it waits.  What comes back from a second tier forms the nodes in which it was evicted, so
    that these are evicted one by one again.
    """

    def __init__(self) -> None:
        self._tree = RadixTree(page_size=1)
        self._block: dict[Key, int] = {}
        self._key: dict[int, Key] = {}
        self._holders: dict[Key, int] = {}
        """Number of holders, for keys that have any."""
        self.node_ends: set[Key] | None = None
        """Last keys of nodes that a second tier has, which also removes them; None without one."""

    @property
    def num_evictable(self) -> int:
        return self._tree.num_evictable_tokens

    def __contains__(self, key: Key) -> bool:
        return key in self._block

    def num_holders(self, key: Key) -> int:
        return self._holders.get(key, 0)

    def block(self, key: Key) -> int | None:
        return self._block.get(key)

    def twins_in(
        self,
        keys: Sequence[Key],  # noqa: ARG002
        num: int,  # noqa: ARG002
    ) -> Iterator[tuple[int, Mapping[int, int]]]:
        return iter(())

    def lock(self, keys: Sequence[Key]) -> list[int]:
        if keys:
            self._tree.lock(self._node(keys))
        self._hold(keys)
        return [self._block[key] for key in keys]

    def unlock(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:  # noqa: ARG002
        if keys:
            self._tree.unlock(self._node(keys))
        for key in keys:
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]

    def requeue(self, keys: Sequence[Key], blocks: Sequence[int]) -> None:  # noqa: ARG002
        self._tree.match(_path(keys))

    def insert(self, keys: Sequence[Key], num_held: int, blocks: Sequence[int]) -> list[int]:
        places = [*(0 for _ in range(num_held)), *blocks]  # the held ones are there: not read
        for stop in self._ends_of_nodes(keys, num_held):
            num_known = self._tree.insert(_path(keys[:stop]), places)
            for key, block in zip(keys[num_known:stop], places[num_known:stop], strict=True):
                self._block[key] = block
                self._key[block] = key
        self._tree.lock(self._node(keys))
        if num_held:
            self._tree.unlock(self._node(keys[:num_held]))
        self._hold(keys[num_held:])
        return [self._block[key] for key in keys[num_held:]]

    def evict(self, count: int) -> list[tuple[Key, int]]:
        gone = []
        for leaf in self._tree.evict(count):
            if self.node_ends is not None:
                self.node_ends.add(self._key[leaf[0]])
            for block in leaf:
                key = self._key.pop(block)
                del self._block[key]
                gone.append((key, block))
        return gone

    def discard(self, blocks: Sequence[int]) -> list[tuple[Key, int]]:
        assert not blocks, "only what is computed is in the tree"
        return []

    def blocks(self) -> dict[int, int]:
        self._tree.check()
        return {block: self.num_holders(key) for block, key in self._key.items()}

    def _ends_of_nodes(self, keys: Sequence[Key], first: int) -> list[int]:
        """Return the numbers of keys at which nodes end, where evicted nodes ended before."""
        ends, last = self.node_ends, len(keys)
        if not ends:
            return [last]
        return [*(stop for stop in range(first + 1, last) if keys[stop - 1] in ends), last]

    def _hold(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._holders[key] = self._holders.get(key, 0) + 1

    def _node(self, keys: Sequence[Key]) -> Node:
        num_found, node = self._tree.match(_path(keys))
        assert num_found == len(keys), "a prefix that is held is not in the tree"
        return node


def _path(keys: Sequence[Key]) -> Sequence[int]:
    """Return keys as tokens of the tree, which only compares them."""
    return cast("Sequence[int]", keys)
