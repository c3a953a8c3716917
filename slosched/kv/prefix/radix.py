"""A radix tree of token pages: the prefixes that are cached, and the blocks that hold them.

It is a pure data structure that owns no memory and knows no request.  A node holds the pages by
which it extends its parent, and the block of each.  The user of a prefix locks its last node, which
protects every node up to the root.  Leaves that are not locked may be evicted, the least recently
used first.

Source: the RadixCache of SGLang 0.5.5 (RadixAttention, Zheng et al. 2024, arXiv:2312.07104).
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from slosched.core import SloschedError


class RadixCorruptionError(SloschedError):
    """Counts or links of a tree that do not add up: a bug in the tree."""


class Node:
    """Pages that follow on those of `parent`.  Only the tree creates and changes nodes."""

    __slots__ = (
        "blocks",
        "children",
        "is_queued",
        "key",
        "num_locks",
        "parent",
        "tokens",
        "used_at",
    )

    def __init__(
        self,
        key: Hashable,
        tokens: tuple[int, ...],
        blocks: list[int],
        parent: Node | None,
        used_at: int,
    ) -> None:
        self.key = key
        """Key of this node among the children of its parent."""
        self.tokens = tokens
        self.blocks = blocks
        """The block of each page."""
        self.parent = parent
        self.children: dict[Hashable, Node] = {}
        """Children by their first page and `extra_key`."""
        self.num_locks = 0
        """Locks of this node and of all nodes below it."""
        self.used_at = used_at
        """Time of the last use on the tree's own clock, which counts uses."""
        self.is_queued = False
        """Whether the node is in the queue of leaves to be evicted."""

    def __lt__(self, other: Node) -> bool:
        return self.used_at < other.used_at

    def path(self) -> Iterator[Node]:
        """Yield this node and those above it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Match(NamedTuple):
    """The longest cached prefix."""

    num_tokens: int
    node: Node
    """The node at which the prefix ends; the root if nothing is cached."""


class RadixTree:
    """The cached prefixes.  Matching and inserting take time O(tokens), evicting O(log leaves).

    Invariant: every token of a node is either evictable or protected, a node is locked at least as
    often as all its children together, and no block is in the tree twice.
    """

    def __init__(self, page_size: int = 1) -> None:
        """Begin an empty tree; tokens that do not fill a page of `page_size` are not kept."""
        if page_size < 1:
            raise ValueError(f"a page holds at least one token, not {page_size}")
        self.page_size = page_size
        self.num_evictable_tokens = 0
        self.num_protected_tokens = 0
        self._clock = 0
        self.root = Node(None, (), [], None, 0)
        self._leaves: list[tuple[int, Node]] = []
        """A heap of leaves to evict by last use; an entry may be too early, never too late."""

    def __iter__(self) -> Iterator[Node]:
        """Yield all nodes except the root, parents first."""
        todo = list(self.root.children.values())
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def match(self, tokens: Sequence[int], extra_key: Hashable = None) -> Match:
        """Return the longest cached prefix of `tokens` and count it as used.

        A node that matches in part is split, so that a prefix ends where a node does.  Prefixes of
        another `extra_key` (of an adapter or a tenant) are other prefixes.
        """
        return self._walk(self._whole_pages(tokens), extra_key)

    def insert(
        self, tokens: Sequence[int], blocks: Sequence[int], extra_key: Hashable = None
    ) -> int:
        """Keep `tokens`, each whole page of which is in the block of the same place in `blocks`.

        Return how many of the first tokens were in the tree already; it keeps its own blocks for
        them.  Raise ValueError if blocks are missing.
        """
        pages = self._whole_pages(tokens)
        num_pages = len(pages) // self.page_size
        if len(blocks) < num_pages:
            raise ValueError(f"{num_pages} pages need as many blocks, not {len(blocks)}")
        num_known, node = self._walk(pages, extra_key)
        if num_known < len(pages):
            new = list(blocks[num_known // self.page_size : num_pages])
            key = self._key_of(pages, num_known, extra_key)
            leaf = node.children[key] = Node(key, pages[num_known:], new, node, self._tick())
            self.num_evictable_tokens += len(leaf.tokens)
            self._queue(leaf)
        return num_known

    def blocks_of(self, node: Node) -> list[int]:
        """Return the blocks of the whole prefix that ends at `node`, in order."""
        return [block for part in reversed(list(node.path())) for block in part.blocks]

    def lock(self, node: Node) -> int:
        """Protect the prefix that ends at `node`; return how many tokens were not protected."""
        num_tokens = 0
        for part in node.path():
            if part.num_locks == 0:
                num_tokens += len(part.tokens)
            part.num_locks += 1
        self._protect(num_tokens)
        return num_tokens

    def unlock(self, node: Node) -> int:
        """Take one lock back; return how many tokens are no longer protected."""
        num_tokens = 0
        for part in node.path():
            if part.num_locks < 1:
                raise RadixCorruptionError("a prefix is unlocked more often than it was locked")
            part.num_locks -= 1
            if part.num_locks == 0:
                num_tokens += len(part.tokens)
                self._queue(part)
        self._protect(-num_tokens)
        return num_tokens

    def num_unprotected_tokens(self, node: Node) -> int:
        """Return how many tokens a lock of `node` would protect."""
        return sum(len(part.tokens) for part in node.path() if part.num_locks == 0)

    def evict(self, num_tokens: int) -> list[list[int]]:
        """Drop whole leaves, the least recently used first, until `num_tokens` are gone.

        Return the blocks of each leaf, the last block first, so that each comes after those that
        follow it.  Fewer tokens are dropped if all that is left is locked.
        """
        leaves: list[list[int]] = []
        num_evicted = 0
        while num_evicted < num_tokens and self._leaves:
            used_at, leaf = heapq.heappop(self._leaves)
            leaf.is_queued = False
            if not self._is_evictable(leaf):
                continue
            if used_at < leaf.used_at:
                self._queue(leaf)
                continue
            num_evicted += len(leaf.tokens)
            leaves.append(leaf.blocks[::-1])
            self._drop(leaf)
        return leaves

    def check(self) -> None:
        """Raise RadixCorruptionError unless the invariant holds.  O(tokens)."""
        nodes = list(self)
        num_free = sum(len(node.tokens) for node in nodes if not node.num_locks)
        num_locked = sum(len(node.tokens) for node in nodes if node.num_locks)
        blocks = [block for node in nodes for block in node.blocks]
        good = (num_free, num_locked) == (self.num_evictable_tokens, self.num_protected_tokens)
        good &= len(set(blocks)) == len(blocks) and all(
            node.tokens
            and len(node.tokens) == len(node.blocks) * self.page_size
            and node.num_locks >= sum(child.num_locks for child in node.children.values())
            and (node.is_queued or not self._is_evictable(node))
            for node in nodes
        )
        if not good:
            raise RadixCorruptionError(
                f"the radix tree counts {self.num_evictable_tokens} evictable and "
                f"{self.num_protected_tokens} protected tokens; its {len(nodes)} nodes hold "
                f"{num_free} and {num_locked} in {len(blocks)} blocks"
            )

    def _walk(self, pages: tuple[int, ...], extra_key: Hashable) -> Match:
        node, at = self.root, 0
        while at < len(pages):
            child = node.children.get(self._key_of(pages, at, extra_key))
            if child is None:
                break
            child.used_at = self._tick()
            num_common = _num_common(child.tokens, pages, at)
            num_common -= num_common % self.page_size
            at += num_common
            node = child
            if num_common < len(child.tokens):
                node = self._split(child, num_common, extra_key)
                break
        return Match(at, node)

    def _split(self, node: Node, num_tokens: int, extra_key: Hashable) -> Node:
        """Return a new node above `node` that takes over its first tokens and its locks."""
        parent, num_pages = node.parent, num_tokens // self.page_size
        assert parent is not None
        tokens, blocks = node.tokens[:num_tokens], node.blocks[:num_pages]
        upper = Node(node.key, tokens, blocks, parent, self._tick())
        upper.num_locks = node.num_locks
        parent.children[upper.key] = upper
        node.key, node.parent = self._key_of(node.tokens, num_tokens, extra_key), upper
        upper.children[node.key] = node
        node.tokens, node.blocks = node.tokens[num_tokens:], node.blocks[num_pages:]
        return upper

    def _drop(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.key]
        self.num_evictable_tokens -= len(leaf.tokens)
        self._queue(parent)

    def _queue(self, node: Node) -> None:
        """Queue a node for eviction if it may be evicted."""
        if not node.is_queued and self._is_evictable(node):
            node.is_queued = True
            heapq.heappush(self._leaves, (node.used_at, node))

    def _is_evictable(self, node: Node) -> bool:
        return not (node.children or node.num_locks or node.parent is None)

    def _protect(self, num_tokens: int) -> None:
        self.num_evictable_tokens -= num_tokens
        self.num_protected_tokens += num_tokens

    def _key_of(self, pages: tuple[int, ...], at: int, extra_key: Hashable) -> Hashable:
        if self.page_size == 1:
            return pages[at], extra_key
        return pages[at : at + self.page_size], extra_key

    def _whole_pages(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(tokens[: len(tokens) - len(tokens) % self.page_size])

    def _tick(self) -> int:
        self._clock += 1
        return self._clock


def _num_common(tokens: tuple[int, ...], others: tuple[int, ...], at: int) -> int:
    """Return how many of the first `tokens` equal `others` from `at` on, comparing slices in C."""
    low, high = 0, min(len(tokens), len(others) - at)
    if tokens[:high] == others[at : at + high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if tokens[low:middle] == others[at + low : at + middle]:
            low = middle
        else:
            high = middle - 1
    return low
