"""The radix tree, compared with a naive model: the set of cached prefixes and their locks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from itertools import chain

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from slosched.kv.prefix.radix import Node, RadixCorruptionError, RadixTree

Prefix = tuple[Hashable, tuple[int, ...]]

token_ids = st.lists(st.integers(0, 2), max_size=14)
extra_keys = st.sampled_from((None, "adapter"))


class RadixMachine(RuleBasedStateMachine):
    """The naive model is a dict from each cached page's whole prefix to its block."""

    page_size = 1
    locks = Bundle("locks")

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixTree(self.page_size)
        self.blocks: dict[Prefix, int] = {}
        self.locked: Counter[Prefix] = Counter()
        self.num_blocks = 0

    def prefixes(self, tokens: list[int], extra_key: Hashable) -> list[Prefix]:
        """Return the prefixes that end with a whole page."""
        size = self.page_size
        ends = range(size, len(tokens) + 1, size)
        return [(extra_key, tuple(tokens[:end])) for end in ends]

    def cached(self, tokens: list[int], extra_key: Hashable) -> list[Prefix]:
        return [p for p in self.prefixes(tokens, extra_key) if p in self.blocks]

    @rule(tokens=token_ids, extra_key=extra_keys)
    def insert(self, tokens: list[int], extra_key: Hashable) -> None:
        prefixes = self.prefixes(tokens, extra_key)
        first = self.num_blocks
        self.num_blocks += len(prefixes)
        known = self.cached(tokens, extra_key)
        new = range(first, self.num_blocks)
        assert self.tree.insert(tokens, new, extra_key) == len(known) * self.page_size
        for prefix, block in zip(prefixes, new, strict=True):
            self.blocks.setdefault(prefix, block)

    @rule(tokens=token_ids, extra_key=extra_keys)
    def match(self, tokens: list[int], extra_key: Hashable) -> None:
        num_tokens, node = self.tree.match(tokens, extra_key)
        cached = self.cached(tokens, extra_key)
        assert num_tokens == len(cached) * self.page_size
        assert self.tree.blocks_of(node) == [self.blocks[p] for p in cached]

    @rule(target=locks, tokens=token_ids, extra_key=extra_keys)
    def lock(self, tokens: list[int], extra_key: Hashable) -> tuple[Node, list[Prefix]]:
        node = self.tree.match(tokens, extra_key).node
        cached = self.cached(tokens, extra_key)
        num_new = sum(not self.locked[p] for p in cached) * self.page_size
        assert self.tree.num_unprotected_tokens(node) == num_new
        assert self.tree.lock(node) == num_new
        self.locked.update(cached)
        return node, cached

    @rule(lock=consumes(locks))
    def unlock(self, lock: tuple[Node, list[Prefix]]) -> None:
        node, cached = lock
        self.locked.subtract(cached)
        assert self.tree.unlock(node) == sum(not self.locked[p] for p in cached) * self.page_size

    @rule(num_tokens=st.integers(0, 12))
    def evict(self, num_tokens: int) -> None:
        """Evict leaves; they must be unlocked, and every page that stays must have its parent."""
        gone = set(chain(*self.tree.evict(num_tokens)))
        assert len(gone) * self.page_size >= min(num_tokens, self.num_unlocked_tokens())
        for prefix in [p for p, block in self.blocks.items() if block in gone]:
            assert not self.locked[prefix]
            del self.blocks[prefix]
        for extra_key, tokens in self.blocks:
            parent = (extra_key, tokens[: -self.page_size])
            assert parent in self.blocks or not parent[1]

    @rule()
    def evict_one_leaf(self) -> None:
        """Evict one leaf, which must be the least recently used one."""
        leaves = [node for node in self.tree if not node.children and not node.num_locks]
        oldest = min(leaves, key=lambda node: node.used_at, default=None)
        expected = [] if oldest is None else oldest.blocks[::-1]
        gone = list(chain(*self.tree.evict(1)))
        assert gone == expected
        self.blocks = {p: block for p, block in self.blocks.items() if block not in gone}

    def num_unlocked_tokens(self) -> int:
        return sum(not self.locked[p] for p in self.blocks) * self.page_size

    @invariant()
    def adds_up(self) -> None:
        self.tree.check()
        total = self.tree.num_evictable_tokens + self.tree.num_protected_tokens
        assert total == len(self.blocks) * self.page_size
        assert self.tree.num_evictable_tokens == self.num_unlocked_tokens()


class PagedRadixMachine(RadixMachine):
    page_size = 3


RadixMachine.TestCase.settings = settings(stateful_step_count=40)
PagedRadixMachine.TestCase.settings = RadixMachine.TestCase.settings
TestRadix = RadixMachine.TestCase
TestPagedRadix = PagedRadixMachine.TestCase


def test_a_partial_match_splits_a_node_and_only_what_is_unused_goes() -> None:
    tree = RadixTree()
    assert tree.insert([1, 2, 3, 4], [10, 11, 12, 13]) == 0
    matched = tree.match([1, 2, 9])
    assert (matched.num_tokens, tree.blocks_of(matched.node)) == (2, [10, 11])
    assert tree.lock(matched.node) == 2
    assert (tree.num_evictable_tokens, tree.num_protected_tokens) == (2, 2)
    assert tree.evict(4) == [[13, 12]]
    assert tree.match([1, 2, 3, 4]).num_tokens == 2
    assert tree.unlock(matched.node) == 2
    assert tree.evict(1) == [[11, 10]]


def test_what_was_used_last_goes_last() -> None:
    tree = RadixTree()
    tree.insert([1, 2], [0, 1])
    tree.insert([3, 4], [2, 3])
    tree.match([1, 2])
    assert tree.evict(1) == [[3, 2]]


def test_a_part_of_a_page_is_not_kept() -> None:
    tree = RadixTree(page_size=4)
    assert tree.insert(range(7), [5]) == 0
    assert tree.match(range(7)).num_tokens == 4
    assert tree.match([0, 1, 2]).num_tokens == 0


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        RadixTree(0)
    tree = RadixTree(page_size=2)
    with pytest.raises(ValueError, match="2 pages need as many blocks, not 1"):
        tree.insert([1, 2, 3, 4], [7])
    tree.insert([1, 2], [7])
    with pytest.raises(RadixCorruptionError, match="more often"):
        tree.unlock(tree.match([1, 2]).node)
    tree.num_evictable_tokens += 1
    with pytest.raises(RadixCorruptionError, match="3 evictable"):
        tree.check()
