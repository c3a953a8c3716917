"""The prefix cache, compared with a naive model of block contents, in any order of operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slosched.core import EndReason, Limits, Request, RequestStatus, ScheduledChunk, StepResult
from slosched.kv import (
    HashIndex,
    KVCache,
    MergedIndex,
    OutOfBlocksError,
    PrefixIndex,
    RadixIndex,
    block_keys,
)
from slosched.policy.edf import EDF
from slosched.scheduler import Scheduler

NUM_BLOCKS, NUM_HOST_BLOCKS, SIZE = 14, 10, 2

Prefix = tuple[int, ...]


def make(name: str, tokens: Prefix, num_prompt: int) -> Request:
    """Return a request whose first `num_prompt` tokens are its prompt and the others its output."""
    request = Request(name, 0.0, num_prompt, 99, prompt_token_ids=tokens[:num_prompt])
    request.output_token_ids = list(tokens[num_prompt:])
    request.num_output_tokens = len(tokens) - num_prompt
    return request


@dataclass
class Step:
    """The chunk of one request in a step; several may be planned before the first has run."""

    chunk: ScheduledChunk
    blocks: set[int]
    """The blocks whose content the prefix cache finds from now on."""


class PrefixMachine(RuleBasedStateMachine):
    """Requests of few different tokens, so that most share a prefix with others.

    This is the cache of vLLM: it finds a block as soon as the block is planned, keeps duplicates,
    and evicts the block first that was released first.
    """

    new_index: Callable[[], PrefixIndex] = HashIndex

    def __init__(self) -> None:
        super().__init__()
        self.index = self.new_index()
        self.kv = KVCache(NUM_BLOCKS, SIZE, NUM_HOST_BLOCKS, self.index)
        self.tokens: dict[str, Prefix] = {}
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, int] = {}
        """The number of tokens that the KV cache reported as cached, by waiting request."""
        self.running: dict[str, Request] = {}
        self.swapped: dict[str, Request] = {}
        self.cached: dict[int, Prefix] = {}
        """The prefix that ends with each cached block, the oldest block first."""
        self.left: list[int] = []
        """Cached blocks that no request holds, in the order in which they were released."""
        self.memory: dict[int, Prefix] = {}
        """The content of each block: its tokens and all tokens before them."""
        self.host_memory: dict[int, Prefix] = {}
        self.steps: list[Step] = []
        """Steps that are planned and have not run yet."""

    # The naive model.

    def prefixes(self, name: str, num_tokens: int) -> list[Prefix]:
        return [self.tokens[name][:n] for n in range(SIZE, num_tokens + 1, SIZE)]

    def held(self, *without: str) -> set[int]:
        return {b for n in self.running if n not in without for b in self.kv.block_tables[n]}

    def num_free(self) -> int:
        return NUM_BLOCKS - len(self.held())

    def num_empty(self) -> int:
        return NUM_BLOCKS - len(self.held() | self.cached.keys())

    def found(self, name: str) -> list[int]:
        """Return the blocks that the request would share."""
        blocks: list[int] = []
        for prefix in self.prefixes(name, len(self.tokens[name]) - 1):
            block = next((b for b, p in self.cached.items() if p == prefix), None)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def found_back(self, name: str) -> list[int]:
        """Return the blocks that the request would share when it is swapped in."""
        return []

    def evict(self, count: int) -> None:
        for _ in range(count):
            self.drop(self.left[0])

    def drop(self, block: int) -> None:
        self.left.remove(block)
        del self.cached[block]
        for step in self.steps:
            step.blocks.discard(block)

    def leave(self, name: str) -> None:
        """Release the cached blocks of a request, its last block first."""
        blocks = [b for b in self.kv.block_tables[name] if b in self.cached]
        self.left += [b for b in reversed(blocks) if b not in self.held(name)]
        del self.running[name]

    def notice(self, name: str, more: int, prior: int) -> None:
        """Note a planned or finished step: its full blocks can be found from now on."""
        request, table = self.requests[name], self.kv.block_tables[name]
        chunk = ScheduledChunk(request, more, prior, False, table)
        self.kv.prefixes.note_planned([chunk])
        new = set()
        for block, prefix in zip(table, self.prefixes(name, prior + more), strict=False):
            if self.cached.setdefault(block, prefix) is prefix:
                new.add(block)
        self.steps.append(Step(chunk, new))

    # What can happen.

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), num_prompt=st.integers(1, 14)
    )
    def arrive(self, tokens: list[int], num_prompt: int) -> None:
        name = f"r{len(self.tokens)}"
        self.tokens[name] = tuple(tokens)
        self.requests[name] = make(name, tuple(tokens), min(num_prompt, len(tokens)))
        self.wait(name)

    def wait(self, name: str) -> None:
        request = self.requests[name]
        request.status, request.num_computed_tokens = RequestStatus.WAITING, 0
        self.waiting[name] = 0
        self.kv.prefixes.watch(request)

    def startable(self, queue: dict[str, Any]) -> list[str]:
        """Return the requests without a running step, as only these can start."""
        return sorted(queue.keys() - {s.chunk.request.request_id for s in self.steps})

    @precondition(lambda self: self.startable(self.waiting))
    @rule(data=st.data(), more=st.integers(1, 9))
    def start(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(self.startable(self.waiting)))
        more = min(more, len(self.tokens[name]) - self.waiting[name])
        missing = self.num_blocks(self.waiting[name] + more)
        missing -= self.kv.ledger().num_ready_blocks(name)
        self.try_to_start(name, more, missing, None)

    def try_to_start(self, name: str, more: int, missing: int, num_found: int | None) -> None:
        found, cached = self.found(name), self.waiting[name] if num_found is None else num_found
        new = self.num_blocks(cached + more) - len(found)
        assert missing == len({*found} - self.held()) + new
        if missing > self.num_free():
            return
        self.kv.prefixes.start(name, num_found)
        assert self.kv.block_tables[name] == found
        self.left = [b for b in self.left if b not in found]
        request = self.running[name] = self.requests[name]
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, cached
        del self.waiting[name]
        self.compute(name, more)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.integers(1, 9))
    def go_on(self, data: st.DataObject, more: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        more = min(more, len(self.tokens[name]) - self.running[name].num_computed_tokens)
        if more:
            self.compute(name, more)

    def compute(self, name: str, more: int) -> None:
        prior = self.running[name].num_computed_tokens
        after = prior + more
        missing = self.num_blocks(after) - self.kv.num_held_blocks(name)
        if missing > self.num_free():
            with pytest.raises(OutOfBlocksError):
                self.kv.grow(name, after)
            return
        self.evict(max(0, missing - self.num_empty()))
        table, tokens = self.kv.grow(name, after), self.tokens[name]
        for i in range(prior // SIZE, self.num_blocks(after)):
            assert table[i] not in self.held(name), "a block is written that somebody shares"
            self.memory[table[i]] = tokens[: min((i + 1) * SIZE, after)]
        self.running[name].num_computed_tokens = after
        self.notice(name, more, prior)

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // SIZE)

    @precondition(lambda self: self.steps)
    @rule()
    def run_a_step(self) -> None:
        self.run(self.steps.pop(0))

    def run(self, step: Step) -> None:
        self.kv.prefixes.note_computed([step.chunk])

    @precondition(lambda self: self.steps)
    @rule()
    def fail_a_step(self) -> None:
        """End all requests that rely on the blocks of a failed step; the blocks are no longer found."""
        failed = self.steps[0].chunk.request
        spoilt = self.kv.prefixes.counting_on({failed})
        own = {b for s in self.steps if s.chunk.request is failed for b in s.blocks}
        assert {n for n in self.running if own & {*self.kv.block_tables[n]}} <= {*spoilt}
        self.finish([failed.request_id, *spoilt])
        self.kv.prefixes.on_failed_step({failed})
        unfinished = {b for s in self.steps for b in s.blocks}
        for block in unfinished - self.held():
            self.drop(block)
        self.steps = [step for step in self.steps if step.chunk.request is not failed]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        self.leave(name)
        self.kv.free(name)
        self.wait(name)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        names = sorted(self.waiting) + sorted(self.running) + sorted(self.swapped)
        if names:
            self.finish([data.draw(st.sampled_from(names))])
            self.kv.prefixes.settle_ends()

    def finish(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.running:
                self.leave(name)
            self.waiting.pop(name, None)
            self.swapped.pop(name, None)
            if self.requests[name].end_reason is None:
                self.kv.forget(name)
                self.requests[name].end_reason = EndReason.CLIENT

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        if self.kv.num_held_blocks(name) > self.kv.num_free_host_blocks:
            return
        request = self.running[name]
        self.leave(name)
        for copy in self.kv.swap_out(name):
            self.host_memory[copy.host_block] = self.memory[copy.device_block]
        request.status = RequestStatus.SWAPPED
        self.swapped[name] = request

    @precondition(lambda self: self.startable(self.swapped))
    @rule(data=st.data())
    def swap_in(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(self.startable(self.swapped)))
        found = self.found_back(name)
        num_new = self.kv.num_held_host_blocks(name) - len(found)
        if len({*found} - self.held()) + num_new > self.num_free():
            return
        self.left = [b for b in self.left if b not in found]
        self.kv.prefixes.start(name)
        assert self.kv.block_tables[name] == found
        self.evict(max(0, num_new - self.num_empty()))
        for copy in self.kv.swap_in(name):
            self.memory[copy.device_block] = self.host_memory[copy.host_block]
        request = self.running[name] = self.swapped.pop(name)
        request.status = RequestStatus.RUNNING

    @precondition(lambda self: len(self.running) + len(self.waiting) > 1)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        """Check that the ledger knows the free blocks of a plan before the plan is carried out."""
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
        held = self.held(*leaving).union(*map(self.found, starting))
        assert num_free == NUM_BLOCKS - len(held)

    # What is always true.

    def forget_what_went(self) -> None:
        """Do nothing, as this model knows beforehand which blocks are evicted."""

    @invariant()
    def blocks_add_up(self) -> None:
        self.forget_what_went()
        self.kv.check()
        assert self.kv.num_free_blocks == self.num_free()
        assert self.index.blocks().keys() == self.cached.keys()

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        for name, request in self.running.items():
            num = request.num_computed_tokens
            full = [self.memory[block] for block in self.kv.block_tables[name]]
            assert full[: num // SIZE] == self.prefixes(name, num)

    @invariant()
    def who_waits_is_told_what_is_cached(self) -> None:
        cached = dict(self.kv.prefixes.refresh())
        self.waiting |= {name: n for name, n in cached.items() if name not in self.swapped}
        for name, num_tokens in self.waiting.items():
            assert num_tokens == len(self.found(name)) * SIZE
            self.requests[name].num_computed_tokens = num_tokens


class HashMachine(PrefixMachine):
    """The rules that hold for the cache of vLLM alone."""

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data())
    def plan_in_order(self, data: st.DataObject) -> None:
        """Check that waiting requests find the blocks that earlier parts of the plan compute or free."""
        leaving = data.draw(st.sets(st.sampled_from(sorted(self.running)))) if self.running else ()
        names = [
            n for n in (*sorted(self.running), *self.startable(self.waiting)) if n not in leaving
        ]
        ledger, num_free = self.kv.ledger(), self.kv.num_free_blocks
        for name in sorted(leaving):
            num_free += ledger.leave(name)
        planned: dict[str, int] = {}
        found: dict[str, int] = {}
        costs: dict[str, int] = {}
        for name in data.draw(st.permutations(names)):
            prior = self.requests[name].num_computed_tokens
            if name in self.waiting:
                prior = ledger.find(name, planned)
                assert prior is not None
            more = min(data.draw(st.integers(1, 9)), len(self.tokens[name]) - prior)
            missing = self.num_blocks(prior + more) - ledger.num_ready_blocks(name)
            if more and missing <= num_free:
                num_free -= missing
                planned[name], costs[name] = more, missing
                if name in self.waiting:
                    found[name] = prior
                    ledger.start(name)
        for name in sorted(leaving):
            self.leave(name)
            self.kv.free(name)
        for name, more in planned.items():
            if name in found:
                assert found[name] == len(self.found(name)) * SIZE
                self.try_to_start(name, more, costs[name], found[name])
            else:
                self.compute(name, more)
        for name in sorted(leaving):
            self.wait(name)
        assert self.kv.num_free_blocks == num_free


class MergedMachine(HashMachine):
    """The cache of vLLM V0, which keeps one copy of what was computed twice."""

    new_index = MergedIndex

    def run(self, step: Step) -> None:
        name = step.chunk.request.request_id
        num_tokens = step.chunk.num_prior_tokens + step.chunk.num_new_tokens
        prefixes = self.prefixes(name, num_tokens) if name in self.running else []
        before = self.kv.block_tables[name][: len(prefixes)] if prefixes else []
        super().run(step)
        for place, (own, prefix) in enumerate(zip(before, prefixes, strict=True)):
            oldest = next(block for block, other in self.cached.items() if other == prefix)
            assert self.kv.block_tables[name][place] == oldest
            if oldest != own:
                del self.cached[own]
                self.left = [block for block in self.left if block != oldest]
                for other_step in self.steps:
                    other_step.blocks.discard(own)

    def found_back(self, name: str) -> list[int]:
        found: list[int] = []
        for prefix in self.prefixes(name, self.requests[name].num_computed_tokens):
            same = [block for block, other in self.cached.items() if other == prefix]
            if not same:
                break
            found.append(same[0])
        return found


class RadixMachine(PrefixMachine):
    """A radix tree, which finds only computed blocks and keeps no duplicates.

    The tree chooses which leaves are evicted; test_radix.py tests that.
    """

    new_index = RadixIndex

    def __init__(self) -> None:
        super().__init__()
        self.may_not_go: set[int] = set()

    def evict(self, count: int) -> None:
        """Note the blocks that must not be evicted; others may take the evicted ones at once."""
        self.may_not_go = self.held()

    def notice(self, name: str, more: int, prior: int) -> None:
        request, table = self.requests[name], self.kv.block_tables[name]
        self.kv.prefixes.note_computed([ScheduledChunk(request, more, prior, False, table)])
        self.forget_what_went()
        for block, prefix in zip(table, self.prefixes(name, prior + more), strict=False):
            if prefix not in self.cached.values():
                self.cached[block] = prefix
            assert self.cached[block] == prefix

    def forget_what_went(self) -> None:
        here = self.index.blocks()
        gone = [b for b in self.cached if b not in here or self.key_at(b) not in self.index]
        assert not self.may_not_go.intersection(gone)
        for block in gone:
            del self.cached[block]

    def key_at(self, block: int) -> object:
        prefix = self.cached[block]
        return block_keys(make("", prefix, len(prefix)), SIZE).first(99)[-1]


TestPrefixCache = HashMachine.TestCase
TestPrefixCache.settings = settings(stateful_step_count=40)
TestMergedCache = MergedMachine.TestCase
TestMergedCache.settings = settings(stateful_step_count=40)
TestRadixCache = RadixMachine.TestCase
TestRadixCache.settings = settings(stateful_step_count=40)


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


def test_an_adapter_and_a_salt_have_keys_of_their_own() -> None:
    """This also holds for adapters and salts of the same name."""
    requests = [make(name, tuple(range(8)), 8) for name in "abcd"]
    requests[1].lora_id = requests[2].cache_salt = "styled"
    requests[3].lora_id = requests[3].cache_salt = "styled"
    keys = [key for request in requests for key in keys_of(request)]
    assert len({*keys}) == len(keys) == 8
    again = make("e", tuple(range(8)), 8)
    again.cache_salt = "styled"
    assert keys_of(again) == keys_of(requests[2])


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
        kv.prefixes.watch(request)
        assert dict(kv.prefixes.refresh()) == {name: 0}
        kv.prefixes.start(name)
        kv.grow(name, 12)
        kv.prefixes.note_computed([ScheduledChunk(request, 12, 0, True, ())])
    assert kv.num_free_blocks == 2
    assert kv.prefixes.index.num_evictable == 0


def test_a_step_of_a_request_that_has_ended_fills_no_blocks_of_its_namesake() -> None:
    """With overlap, a client may cancel and send the same request id again while the step runs."""
    kv = KVCache(8, 4, 0, HashIndex())
    first, second = make("a", tuple(range(9)), 9), make("a", tuple(range(20, 29)), 9)
    for request in (first, second):
        kv.prefixes.watch(request)
        list(kv.prefixes.refresh())
        kv.prefixes.start("a")
        kv.grow("a", 8)
        if request is first:
            request.end_reason = EndReason.CLIENT
            kv.forget("a")
    kv.prefixes.note_computed([ScheduledChunk(first, 8, 0, False, ())])
    kv.forget("a")
    assert kv.prefixes.index.num_evictable == 0


def test_what_was_left_first_goes_first_and_of_one_request_its_tail() -> None:
    kv = KVCache(6, 4, 0, HashIndex())
    old, new = make("old", tuple(range(8)), 8), make("new", tuple(range(50, 58)), 8)
    for request in (old, new):
        kv.prefixes.watch(request)
        kv.prefixes.start(request.request_id)
        kv.grow(request.request_id, 8)
        kv.prefixes.note_computed([ScheduledChunk(request, 8, 0, True, ())])
    kv.forget("old")
    kv.forget("new")
    kept: dict[str, list[int]] = {"old": [], "new": []}
    for taken in range(2, 6):
        kv.grow("other", 4 * (taken + 1))
        for name, start in (("old", 0), ("new", 50)):
            asks = make("asks", (*range(start, start + 8), 7), 9)
            kv.prefixes.watch(asks)
            kept[name].append(dict(kv.prefixes.refresh())["asks"] // 4)
            kv.forget("asks")
    assert kept == {"old": [1, 0, 0, 0], "new": [2, 2, 1, 0]}


def test_who_was_planned_first_leaves_first_where_all_end_in_one_step() -> None:
    """This also holds for requests without cached blocks, and does not depend on names."""
    index = HashIndex()
    scheduler = Scheduler(EDF(), KVCache(16, 4, 0, index), Limits(max_num_batched_tokens=64))
    for place in range(8):
        prompt = [place] * 5
        scheduler.add_request(Request(f"r{place}", float(place), 5, 1, prompt_token_ids=prompt))
    batch = scheduler.schedule(8.0)
    names = [chunk.request.request_id for chunk in batch.chunks]
    keys = [block_keys(chunk.request, 4).first(1)[0] for chunk in batch.chunks]
    scheduler.update(batch, StepResult(dict.fromkeys(names, 1)), 9.0)
    scheduler.view(9.0)
    assert [key for key, _ in index.evictable()] == keys
