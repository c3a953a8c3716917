"""The prefix cache against a naive model: a set of all prefixes, in any order of operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slosched.core import EndReason, Request, ScheduledChunk
from slosched.kv import (
    HashIndex,
    KVCache,
    OutOfBlocksError,
    PrefixIndex,
    RadixIndex,
    block_keys,
)

NUM_BLOCKS, NUM_HOST_BLOCKS, SIZE = 14, 10, 2

Prefix = tuple[int, ...]


@dataclass
class Held:
    """What a request that runs has on the device."""

    num_computed: int = 0
    num_noted: int = 0
    """Of these tokens the full blocks were handed to the cache."""


def make(name: str, tokens: Prefix, num_prompt: int) -> Request:
    """With so many of its tokens a prompt, the others its output."""
    request = Request(name, 0.0, num_prompt, 99, prompt_token_ids=tokens[:num_prompt])
    request.output_token_ids = list(tokens[num_prompt:])
    request.num_output_tokens = len(tokens) - num_prompt
    return request


class PrefixMachine(RuleBasedStateMachine):
    """Few different tokens, so that most requests share a part with others."""

    new_index: Callable[[], PrefixIndex] = HashIndex

    def __init__(self) -> None:
        super().__init__()
        self.index = self.new_index()
        self.kv = KVCache(NUM_BLOCKS, SIZE, NUM_HOST_BLOCKS, self.index)
        self.tokens: dict[str, Prefix] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, int] = {}
        """How many tokens were said to be cached."""
        self.running: dict[str, Held] = {}
        self.swapped: dict[str, Held] = {}
        self.left_at: dict[Prefix, int] = {}
        """Every cached prefix, and when it was left last."""
        self.memory: dict[int, Prefix] = {}
        """What each block holds: its tokens and all before them."""
        self.host_memory: dict[int, Prefix] = {}
        self.num_left = 0

    # The naive model.

    def prefixes(self, name: str, num_tokens: int) -> list[Prefix]:
        return [self.tokens[name][:n] for n in range(SIZE, num_tokens + 1, SIZE)]

    def held(self) -> set[Prefix]:
        return {p for name, h in self.running.items() for p in self.prefixes(name, h.num_noted)}

    def num_own(self) -> int:
        return sum(-(-h.num_computed // SIZE) - h.num_noted // SIZE for h in self.running.values())

    def num_free(self) -> int:
        return NUM_BLOCKS - len(self.held()) - self.num_own()

    def make_room(self, num_blocks: int) -> None:
        """What was left first goes first, but only where no block without content is left."""
        held, num_empty = self.held(), NUM_BLOCKS - len(self.left_at) - self.num_own()
        idle = [prefix for prefix in self.left_at if prefix not in held]
        for prefix in self.to_go(idle, max(0, num_blocks - num_empty)):
            del self.left_at[prefix]

    def to_go(self, idle: list[Prefix], count: int) -> list[Prefix]:
        return sorted(idle, key=self.left_at.__getitem__)[:count]

    def leave(self, name: str) -> None:
        noted = self.prefixes(name, self.running.pop(name).num_noted)
        for prefix in reversed(noted):
            if prefix not in self.held():
                self.num_left += 1
                self.left_at[prefix] = self.num_left

    def cached_tokens(self, name: str) -> int:
        found = [p for p in self.prefixes(name, len(self.tokens[name]) - 1) if p in self.left_at]
        assert found == self.prefixes(name, len(found) * SIZE), "a gap in a prefix"
        return len(found) * SIZE

    # What can happen.

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), num_prompt=st.integers(1, 14)
    )
    def arrive(self, tokens: list[int], num_prompt: int) -> None:
        name = f"r{len(self.tokens)}"
        self.tokens[name] = tuple(tokens)
        self.requests[name] = make(name, tuple(tokens), min(num_prompt, len(tokens)))
        self.waiting[name] = 0
        self.kv.watch(self.requests[name])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), more=st.integers(1, 9))
    def start(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        cached = self.waiting[name]
        more = min(more, len(self.tokens[name]) - cached)
        ledger = self.kv.ledger()
        missing = -(-(cached + more) // SIZE) - ledger.num_ready_blocks(name)
        held = self.held() | set(self.prefixes(name, cached))
        assert (
            missing == len(held) - len(self.held()) + -(-(cached + more) // SIZE) - cached // SIZE
        )
        if missing > self.num_free():
            return
        del self.waiting[name]
        self.kv.start(name)
        self.running[name] = Held(cached, cached)
        self.compute(name, more)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(1, 9))
    def go_on(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        more = min(more, len(self.tokens[name]) - self.running[name].num_computed)
        if more:
            self.compute(name, more)

    def compute(self, name: str, more: int) -> None:
        held = self.running[name]
        prior, after = held.num_computed, held.num_computed + more
        missing = -(-after // SIZE) - -(-prior // SIZE)
        if missing > self.num_free():
            with pytest.raises(OutOfBlocksError):
                self.kv.grow(name, after)
            return
        table, tokens = self.kv.grow(name, after), self.tokens[name]
        self.make_room(missing)
        others = {b for n in self.running if n != name for b in self.kv.block_table(n)}
        for i in range(prior // SIZE, -(-after // SIZE)):
            assert table[i] not in others, "a block is written that somebody shares"
            self.memory[table[i]] = tokens[: min((i + 1) * SIZE, after)]
        held.num_computed = after
        request = self.requests[name]
        self.kv.note_computed([ScheduledChunk(request, more, prior, False, table)])
        held.num_noted = after // SIZE * SIZE
        for prefix in self.prefixes(name, held.num_noted):
            self.left_at.setdefault(prefix, 0)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.leave(name)
        self.kv.free(name)
        self.waiting[name] = 0
        self.kv.watch(self.requests[name])

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        names = sorted(self.waiting) + sorted(self.running) + sorted(self.swapped)
        if names:
            name = data.draw(st.sampled_from(names))
            if name in self.running:
                self.leave(name)
            self.waiting.pop(name, None)
            self.swapped.pop(name, None)
            self.kv.forget(name)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        if self.kv.num_held_blocks(name) > self.kv.num_free_host_blocks:
            return
        held = self.running[name]
        self.leave(name)
        for copy in self.kv.swap_out(name):
            self.host_memory[copy.host_block] = self.memory[copy.device_block]
        self.swapped[name] = Held(held.num_computed, 0)

    @precondition(lambda self: self.swapped)
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.swapped)))
        num_blocks = self.kv.num_held_host_blocks(name)
        if num_blocks > self.num_free():
            return
        copies = self.kv.swap_in(name)
        self.make_room(num_blocks)
        for copy in copies:
            self.memory[copy.device_block] = self.host_memory[copy.host_block]
        self.running[name] = self.swapped.pop(name)

    @precondition(lambda self: len(self.running) + len(self.waiting) > 1)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        """What a plan does to the free blocks is known before it is carried out."""
        leaving = data.draw(st.sets(st.sampled_from(sorted(self.running)))) if self.running else ()
        names = [n for n, cached in self.waiting.items() if cached]
        starting = data.draw(st.sets(st.sampled_from(sorted(names)))) if names else ()
        ledger, num_free = self.kv.ledger(), self.kv.num_free_blocks
        for name in data.draw(st.permutations([*sorted(leaving), *sorted(starting)])):
            if name in self.running:
                num_free += ledger.leave(name)
            else:
                num_free -= self.waiting[name] // SIZE - ledger.num_ready_blocks(name)
                ledger.start(name)
        staying = [(n, h.num_noted) for n, h in self.running.items() if n not in leaving]
        staying += [(n, self.waiting[n]) for n in starting]
        held = {p for name, num in staying for p in self.prefixes(name, num)}
        own = sum(
            -(-h.num_computed // SIZE) - h.num_noted // SIZE
            for n, h in self.running.items()
            if n not in leaving
        )
        assert num_free == NUM_BLOCKS - len(held) - own

    # What is always true.

    @invariant()
    def blocks_add_up(self) -> None:
        self.kv.check()
        assert self.kv.num_free_blocks == self.num_free()
        assert self.kv.num_cached_blocks == len(self.left_at.keys() - self.held())

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        for name, held in self.running.items():
            full = [self.memory[block] for block in self.kv.block_table(name)]
            assert full[: held.num_computed // SIZE] == self.prefixes(name, held.num_computed)

    @invariant()
    def who_waits_is_told_what_is_cached(self) -> None:
        self.waiting |= dict(self.kv.refresh_matches())
        assert self.waiting == {name: self.cached_tokens(name) for name in self.waiting}


class RadixMachine(PrefixMachine):
    """Which leaves go is the tree's to say (tests/kv/test_radix.py): here, what may go."""

    new_index = RadixIndex

    def to_go(self, idle: list[Prefix], count: int) -> list[Prefix]:
        gone = [
            p for p in idle if block_keys(make("", p, len(p)), SIZE).first(99)[-1] not in self.index
        ]
        assert len(gone) >= count
        assert gone or not count
        return gone


TestPrefixCache = PrefixMachine.TestCase
TestPrefixCache.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestRadixCache = RadixMachine.TestCase
TestRadixCache.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)


def keys_of(request: Request, count: int = 99) -> list[object]:
    return list(block_keys(request, 4).first(count))


def test_equal_keys_are_equal_tokens_from_the_first_on() -> None:
    first = keys_of(make("a", tuple(range(16)), 16))
    other_end = keys_of(make("b", (*range(12), 0, 0, 0, 0), 16))
    other_begin = keys_of(make("c", (99, *range(1, 16)), 16))
    assert len(first) == 4
    assert first[:3] == other_end[:3]
    assert first[3] != other_end[3]
    assert not {*first} & {*other_begin}


def test_outputs_have_keys_as_prompts_do_and_a_part_of_a_block_has_none() -> None:
    tokens = tuple(range(11))
    assert keys_of(make("a", tokens, 3)) == keys_of(make("b", tokens, 11))
    assert len(keys_of(make("a", tokens, 3))) == 2


def test_an_adapter_has_keys_of_its_own() -> None:
    request, other = make("a", tuple(range(8)), 8), make("b", tuple(range(8)), 8)
    other.lora_id = "styled"
    assert not {*keys_of(request)} & {*keys_of(other)}


def traced(hashes: tuple[int, ...], num_tokens: int, block_tokens: int = 10) -> Request:
    return Request("t", 0.0, num_tokens, 9, prefix_hashes=hashes, prefix_block_tokens=block_tokens)


def test_a_hash_of_a_trace_names_the_blocks_that_end_in_it() -> None:
    first = keys_of(traced((1, 2, 3), 30))
    assert len(first) == 7  # 28 of 30 tokens are in full blocks
    # Blocks end at 4, 8 | 12, 16, 20 | 24, 28: the third begins in the first hash's part.
    assert keys_of(traced((1, 2, 9), 30))[:5] == first[:5]
    assert not {*keys_of(traced((1, 2, 9), 30))[5:]} & {*first}
    assert not {*keys_of(traced((9, 2, 3), 30))} & {*first}
    assert keys_of(traced((1, 2, 3), 21)) == first[:5]
    assert len(set(first)) == 7


def test_a_request_without_tokens_and_hashes_shares_nothing() -> None:
    kv = KVCache(8, 4, 0, HashIndex())
    for name in ("a", "b"):
        request = Request(name, 0.0, 12, 4)
        kv.watch(request)
        assert dict(kv.refresh_matches()) == {name: 0}
        kv.start(name)
        kv.grow(name, 12)
        kv.note_computed([ScheduledChunk(request, 12, 0, True, ())])
    assert kv.num_free_blocks == 2
    assert kv.num_cached_blocks == 0


def test_a_step_of_a_request_that_has_ended_fills_no_blocks_of_its_namesake() -> None:
    """Overlapped: its client goes away and asks anew, under the same name, while the step runs."""
    kv = KVCache(8, 4, 0, HashIndex())
    first, second = make("a", tuple(range(9)), 9), make("a", tuple(range(20, 29)), 9)
    for request in (first, second):
        kv.watch(request)
        list(kv.refresh_matches())
        kv.start("a")
        kv.grow("a", 8)
        if request is first:
            request.end_reason = EndReason.CLIENT
            kv.forget("a")
    kv.note_computed([ScheduledChunk(first, 8, 0, False, ())])
    kv.forget("a")
    assert kv.num_cached_blocks == 0


def test_what_was_left_first_goes_first_and_of_one_request_its_tail() -> None:
    kv = KVCache(6, 4, 0, HashIndex())
    old, new = make("old", tuple(range(8)), 8), make("new", tuple(range(50, 58)), 8)
    for request in (old, new):
        kv.watch(request)
        kv.start(request.request_id)
        kv.grow(request.request_id, 8)
        kv.note_computed([ScheduledChunk(request, 8, 0, True, ())])
    kv.forget("old")
    kv.forget("new")
    kept: dict[str, list[int]] = {"old": [], "new": []}
    for taken in range(2, 6):
        kv.grow("other", 4 * (taken + 1))
        for name, start in (("old", 0), ("new", 50)):
            asks = make("asks", (*range(start, start + 8), 7), 9)
            kv.watch(asks)
            kept[name].append(dict(kv.refresh_matches())["asks"] // 4)
            kv.forget("asks")
    assert kept == {"old": [1, 0, 0, 0], "new": [2, 2, 1, 0]}
