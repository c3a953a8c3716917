"""The KV bookkeeping, compared with a naive model under operations in any order."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from slosched.kv import BlockPool, KVCache, KVCorruptionError, OutOfBlocksError

NUM_BLOCKS, NUM_HOST_BLOCKS, BLOCK_SIZE = 12, 8, 4


class KVMachine(RuleBasedStateMachine):
    """The naive model is a dict of token counts; block contents show which copies are needed."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KVCache(NUM_BLOCKS, BLOCK_SIZE, NUM_HOST_BLOCKS)
        self.device: dict[str, int] = {}
        self.host: dict[str, int] = {}
        self.device_memory: dict[int, tuple[str, int]] = {}
        self.host_memory: dict[int, tuple[str, int]] = {}
        self.count = 0

    @rule(target=names)
    def new_name(self) -> str:
        self.count += 1
        return f"r{self.count}"

    def blocks(self, tokens: int) -> int:
        return -(-tokens // BLOCK_SIZE)

    def free_blocks(self) -> int:
        return NUM_BLOCKS - sum(map(self.blocks, self.device.values()))

    def free_host_blocks(self) -> int:
        return NUM_HOST_BLOCKS - sum(map(self.blocks, self.host.values()))

    @rule(name=names, more=st.integers(min_value=1, max_value=20))
    def grow(self, name: str, more: int) -> None:
        if name in self.host:
            return
        before = self.device.get(name, 0)
        missing = self.blocks(before + more) - self.blocks(before)
        if missing > self.free_blocks():
            with pytest.raises(OutOfBlocksError):
                self.kv.grow(name, before + more)
            self.device.setdefault(name, 0)
            return
        table = self.kv.grow(name, before + more)
        self.device[name] = before + more
        for i, block in enumerate(table[self.blocks(before) :], start=self.blocks(before)):
            self.device_memory[block] = (name, i)

    @rule(name=names, more=st.integers(min_value=1, max_value=20))
    def grow_by_lent_blocks(self, name: str, more: int) -> None:
        before = self.device.get(name, 0)
        missing = self.blocks(before + more) - self.blocks(before)
        if not before or missing > self.free_blocks():
            return
        self.kv.lend(missing)
        self.kv.check()
        assert self.kv.num_free_blocks == self.free_blocks() - missing
        self.kv.grow_lent(name, before + more)
        self.device[name] = before + more
        table = self.kv.block_tables[name]
        for i in range(self.blocks(before), len(table)):
            self.device_memory[table[i]] = (name, i)

    @rule(name=names)
    def free(self, name: str) -> None:
        self.kv.free(name)
        self.device.pop(name, None)
        self.host.pop(name, None)

    @rule(name=names)
    def swap_out(self, name: str) -> None:
        if name not in self.device:
            return
        if self.blocks(self.device[name]) > self.free_host_blocks():
            with pytest.raises(OutOfBlocksError):
                self.kv.swap_out(name)
            return
        for copy in self.kv.swap_out(name):
            self.host_memory[copy.host_block] = self.device_memory[copy.device_block]
        self.host[name] = self.device.pop(name)

    @rule(name=names)
    def swap_in(self, name: str) -> None:
        if name not in self.host:
            return
        if self.blocks(self.host[name]) > self.free_blocks():
            with pytest.raises(OutOfBlocksError):
                self.kv.swap_in(name)
            return
        for copy in self.kv.swap_in(name):
            self.device_memory[copy.device_block] = self.host_memory[copy.host_block]
        self.device[name] = self.host.pop(name)

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.kv.check()
        assert self.kv.num_free_blocks == self.free_blocks()
        assert self.kv.num_free_host_blocks == self.free_host_blocks()
        for name, tokens in self.device.items():
            assert self.kv.num_held_blocks(name) == self.blocks(tokens)
        for name, tokens in self.host.items():
            assert self.kv.num_held_host_blocks(name) == self.blocks(tokens)

    @invariant()
    def every_table_holds_its_own_contents_in_order(self) -> None:
        for name, tokens in self.device.items():
            if tokens:
                contents = [self.device_memory[block] for block in self.kv.block_tables[name]]
                assert contents == [(name, i) for i in range(self.blocks(tokens))]


TestKVCache = KVMachine.TestCase


def test_a_lost_block_is_noticed() -> None:
    kv = KVCache(4, 4)
    kv.grow("a", 9)
    kv._tables["a"].pop()
    with pytest.raises(KVCorruptionError, match="1 free \\+ 2 held"):
        kv.check()


def test_a_block_held_twice_is_noticed() -> None:
    kv = KVCache(4, 4)
    kv.grow("a", 4)
    kv.grow("b", 4)
    kv._tables["b"] = list(kv._tables["a"])
    with pytest.raises(KVCorruptionError):
        kv.check()


def test_a_block_freed_twice_is_noticed() -> None:
    kv = KVCache(4, 4)
    blocks = list(kv.grow("a", 8))
    kv.free("a")
    kv._device.give_back(blocks)
    with pytest.raises(KVCorruptionError):
        kv.check()


def test_a_pool_gives_all_it_has_or_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(OutOfBlocksError, match="4 KV blocks wanted, 3 are free"):
        pool.take(4)
    assert pool.num_free == 3


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_an_impossible_cache_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match=str(min(num_blocks, block_size))):
        KVCache(num_blocks, block_size)
