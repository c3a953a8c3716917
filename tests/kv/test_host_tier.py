"""The prefix cache's host tier, compared with a naive model of prefixes and memory contents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slosched.core import EndReason, Request, ScheduledChunk, StepResult
from slosched.kv import (
    HashIndex,
    HostWrites,
    Key,
    KVCache,
    PrefixHost,
    PrefixIndex,
    RadixIndex,
    block_keys,
)
from slosched.kv.prefix.cache import TieredPrefixCache
from slosched.kv.prefix.host_tier import HostTier
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

NUM_BLOCKS, NUM_SWAP_BLOCKS, SIZE, MAX_TOKENS = 9, 3, 2, 9

Prefix = tuple[int, ...]


def make(tokens: Prefix, name: str = "") -> Request:
    return Request(name, 0.0, len(tokens), 99, prompt_token_ids=tokens)


def key_of(prefix: Prefix) -> Key:
    return block_keys(make(prefix), SIZE).first(len(prefix))[-1]


PREFIX_OF = {
    key_of(prefix): prefix
    for length in range(SIZE, MAX_TOKENS, SIZE)
    for prefix in product((0, 1), repeat=length)
}


@dataclass
class Running:
    tokens: Prefix
    num_computed: int

    def prefixes(self, num_tokens: int) -> list[Prefix]:
        return [self.tokens[:end] for end in range(SIZE, num_tokens + 1, SIZE)]


class HostMachine(RuleBasedStateMachine):
    """The index chooses which block the device evicts; this checks what becomes of the block."""

    new_index: Callable[[], PrefixIndex] = HashIndex
    writes = HostWrites.BACK
    num_host_blocks = 6

    def __init__(self) -> None:
        super().__init__()
        self.index = self.new_index()
        self.evicted: list[Prefix] = []
        self.watch_evictions(self.index)
        host = PrefixHost(self.num_host_blocks, self.writes)
        self.kv = KVCache(NUM_BLOCKS, SIZE, NUM_SWAP_BLOCKS, self.index, host)
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, int] = {}
        """The number of tokens that the KV cache reports as cached, by waiting request."""
        self.running: dict[str, Running] = {}
        self.on_device: set[Prefix] = set()
        self.on_host: list[Prefix] = []
        """Prefixes in host memory, in the order in which they are dropped unless pinned."""
        self.pinned: dict[str, list[Prefix]] = {}
        self.launched: list[ScheduledChunk] = []
        """The chunks of the step that is still running."""
        self.memory: dict[int, Prefix] = {}
        self.host_memory: dict[int, Prefix] = {}

    def watch_evictions(self, index: PrefixIndex) -> None:
        evict = index.evict

        def evict_and_tell(count: int) -> list[tuple[Key, int]]:
            gone = evict(count)
            last = reversed(dict.fromkeys(key for key, _ in reversed(gone)))
            self.evicted += [PREFIX_OF[key] for key in last if key not in index]
            return gone

        index.evict = evict_and_tell  # type: ignore[method-assign]

    # The naive model.

    def idle(self) -> list[Prefix]:
        pinned = [prefix for prefixes in self.pinned.values() for prefix in prefixes]
        return [p for p in self.on_host if p not in self.on_device and p not in pinned]

    def keep_on_host(self, prefix: Prefix) -> None:
        if len(self.on_host) == self.num_host_blocks and (idle := self.idle()):
            self.on_host.remove(idle[0])
        if len(self.on_host) < self.num_host_blocks:
            self.on_host.append(prefix)

    def follow_evictions(self) -> None:
        for prefix in self.evicted:
            self.on_device.remove(prefix)
            if prefix in self.on_host:
                self.on_host.remove(prefix)
                self.on_host.append(prefix)
            elif self.writes is HostWrites.BACK:
                self.keep_on_host(prefix)
        self.evicted.clear()

    def cached(self, tokens: Prefix) -> list[Prefix]:
        ends = range(SIZE, len(tokens), SIZE)
        found = [tokens[:end] for end in ends if self.is_cached(tokens[:end])]
        assert found == [tokens[:end] for end in ends[: len(found)]], "a gap in a prefix"
        return found

    def is_cached(self, prefix: Prefix) -> bool:
        return prefix in self.on_device or prefix in self.on_host

    # What can happen.

    @rule(
        prompts=st.lists(
            st.lists(st.integers(0, 1), min_size=MAX_TOKENS - 4, max_size=MAX_TOKENS),
            min_size=1,
            max_size=4,
        )
    )
    def arrive(self, prompts: list[list[int]]) -> None:
        for tokens in prompts:
            name = f"r{len(self.requests)}"
            self.requests[name] = make(tuple(tokens), name)
            self.waiting[name] = 0
            self.kv.prefixes.watch(self.requests[name])

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), overlaps=st.booleans(), aborts=st.sampled_from((False, False, True)))
    def step(self, data: st.DataObject, overlaps: bool, aborts: bool) -> None:
        """Let some requests start and some go on; one may be preempted, or end during the step.

        The step may be planned while the one before it runs.
        """
        preempted = data.draw(st.none() | st.sampled_from(sorted(self.running) or [None]))
        if preempted is not None:
            self.preempt(preempted)
        more = self.plan(data, but=preempted)
        chunks = self.carry_out(more)
        for chunk in chunks:
            self.compute(chunk)
        if aborts and chunks:
            self.leave(data.draw(st.sampled_from(sorted(more))))
        before, self.launched = self.launched, chunks
        self.settle(before)
        if not overlaps:
            self.settle(chunks)
            self.launched = []

    def carry_out(self, more: dict[str, tuple[int, int]]) -> list[ScheduledChunk]:
        free_after = self.kv.num_free_blocks - sum(missing for _, missing in more.values())
        for name in more:
            if name in self.waiting:
                self.start(name)
        assert isinstance(self.kv.prefixes, TieredPrefixCache)
        self.kv.prefixes.load_started()
        chunks = []
        for name, (num_new, _) in more.items():
            prior = self.running[name].num_computed
            table = self.kv.grow(name, prior + num_new)
            self.running[name].num_computed += num_new
            chunks.append(ScheduledChunk(self.requests[name], num_new, prior, False, table))
        assert self.kv.num_free_blocks == free_after
        self.follow_evictions()
        self.copy()
        return chunks

    def plan(self, data: st.DataObject, but: str | None) -> dict[str, tuple[int, int]]:
        """Return the tokens to compute and the blocks to take, by name, and check the ledger."""
        ledger, num_free = self.kv.ledger(), self.kv.num_free_blocks
        chunks = {}
        names = [name for name in (*self.running, *self.waiting) if name != but]
        for name in data.draw(st.permutations(names)):
            tokens = self.requests[name].num_prompt_tokens
            running = self.running.get(name)
            prior = self.waiting[name] if running is None else running.num_computed
            more = data.draw(st.just(tokens - prior) | st.integers(0, tokens - prior))
            missing = -(-(prior + more) // SIZE) - ledger.num_ready_blocks(name)
            if not more or missing > num_free:
                continue
            if running is None:
                found = self.cached(self.requests[name].prompt_token_ids)  # type: ignore[arg-type]
                on_host = [prefix for prefix in found if prefix not in self.on_device]
                assert ledger.num_blocks_to_load(name) == len(on_host)
                ledger.start(name)
            num_free -= missing
            chunks[name] = more, missing
        return chunks

    def start(self, name: str) -> None:
        cached = self.waiting.pop(name)
        tokens = tuple(self.requests[name].prompt_token_ids or ())
        found = self.cached(tokens)
        assert cached == len(found) * SIZE
        self.pinned[name] = [prefix for prefix in found if prefix not in self.on_device]
        self.running[name] = Running(tokens, cached)
        self.kv.prefixes.start(name)

    def copy(self) -> None:
        to_host, from_host = self.kv.prefixes.take_copies()
        host_blocks = [copy.host_block for copy in (*to_host, *from_host)]
        assert all(b >= NUM_SWAP_BLOCKS for b in host_blocks), "a block that is for swapping"
        for device_block, host_block in to_host:
            self.host_memory[host_block] = self.memory[device_block]
        for device_block, host_block in from_host:
            self.memory[device_block] = self.host_memory[host_block]

    def compute(self, chunk: ScheduledChunk) -> None:
        request, num_new, prior, _, table = chunk
        tokens, after = self.running[request.request_id].tokens, prior + num_new
        for place in range(prior // SIZE, -(-after // SIZE)):
            self.memory[table[place]] = tokens[: min((place + 1) * SIZE, after)]

    def settle(self, chunks: list[ScheduledChunk]) -> None:
        """End a step successfully; requests with nothing left to compute leave."""
        self.kv.prefixes.note_computed(chunks)
        for request, num_new, prior, _, _ in chunks:
            name = request.request_id
            if name in self.running:
                self.note(name, prior + num_new)
        for request, num_new, prior, _, _ in chunks:
            if prior + num_new == request.num_prompt_tokens and request.request_id in self.running:
                self.leave(request.request_id)

    def note(self, name: str, num_computed: int) -> None:
        """Make full blocks, copied or computed, available to other requests."""
        for prefix in self.running[name].prefixes(num_computed):
            if prefix not in self.on_device:
                self.on_device.add(prefix)
                follows = len(prefix) == SIZE or prefix[:-SIZE] in self.on_host
                if self.writes is HostWrites.THROUGH and prefix not in self.on_host and follows:
                    self.keep_on_host(prefix)
        self.unpin(name)

    def unpin(self, name: str) -> None:
        pinned = self.pinned.pop(name, [])
        for prefix in reversed(pinned):
            if prefix in self.idle():
                self.on_host.remove(prefix)
                self.on_host.append(prefix)

    def leave(self, name: str) -> None:
        self.requests[name].end_reason = EndReason.CLIENT
        self.kv.forget(name)
        del self.running[name]
        self.unpin(name)

    def preempt(self, name: str) -> None:
        self.kv.free(name)
        del self.running[name]
        self.unpin(name)
        self.waiting[name] = 0
        self.kv.prefixes.watch(self.requests[name])

    @precondition(lambda self: len(self.requests) > 30)
    @rule()
    def fault(self) -> None:
        for name in self.kv.prefixes.counting_on(()):
            self.leave(name)
        self.kv.prefixes.on_failed_step(())
        self.on_host.clear()

    # What is always true.

    @invariant()
    def blocks_add_up(self) -> None:
        self.kv.check()
        assert {p for key, p in PREFIX_OF.items() if key in self.index} == self.on_device
        assert isinstance(self.kv.prefixes, TieredPrefixCache)
        tier = self.kv.prefixes._host
        assert {p for key, p in PREFIX_OF.items() if key in tier} == set(self.on_host)
        assert [PREFIX_OF[key] for key in tier._idle] == self.idle()

    @invariant()
    def every_request_reads_its_own_tokens(self) -> None:
        for name, running in self.running.items():
            full = [self.memory[block] for block in self.kv.block_tables[name]]
            num_full = running.num_computed // SIZE
            assert full[:num_full] == running.prefixes(running.num_computed)

    @invariant()
    def who_waits_is_told_what_is_cached(self) -> None:
        self.waiting |= dict(self.kv.prefixes.refresh())
        for name, num_tokens in self.waiting.items():
            found = self.cached(tuple(self.requests[name].prompt_token_ids or ()))
            assert num_tokens == len(found) * SIZE


class ThroughMachine(HostMachine):
    writes = HostWrites.THROUGH
    num_host_blocks = 14


class RadixMachine(HostMachine):
    new_index = RadixIndex
    num_host_blocks = 3


for machine in (HostMachine, ThroughMachine, RadixMachine):
    machine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestWriteBack = HostMachine.TestCase
TestWriteThrough = ThroughMachine.TestCase
TestRadixWriteBack = RadixMachine.TestCase


class TierAloneMachine(RuleBasedStateMachine):
    """The host tier alone, with blocks that come and go faster than any scheduler moves them.

    While a request waits for a copy of a block from here, another request may compute the same
    block on the device, and the device may evict it again.
    """

    num_blocks = 2

    def __init__(self) -> None:
        super().__init__()
        self.device: set[Key] = set()
        self.tier = HostTier(PrefixHost(self.num_blocks), self.device)
        self.pins: dict[str, Key] = {}
        self.num_pinned = 0

    @rule(key=st.sampled_from("abcd"))
    def come_or_go(self, key: str) -> None:
        """Put the block on the device, or evict it if it is there."""
        if key in self.device:
            self.device.remove(key)
            lost = self.tier.take_over([(key, ord(key))])
        else:
            self.device.add(key)
            lost = self.tier.arrived([key], 0, [ord(key)])
        assert self.device.isdisjoint(lost)
        assert not any(key in self.tier for key in lost)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        here = [key for key in "abcd" if key in self.tier and key not in self.device]
        if here:
            name = f"r{self.num_pinned}"
            self.pins[name] = data.draw(st.sampled_from(here))
            self.num_pinned += 1
            self.tier.pin(name, [self.pins[name]])

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.pins)))
        del self.pins[name]
        self.tier.unpin(name)

    @invariant()
    def what_is_pinned_stays(self) -> None:
        assert self.tier.is_sound()
        assert all(key in self.tier for key in self.pins.values())


TestTierAlone = TierAloneMachine.TestCase


def test_a_block_that_is_pinned_stays_though_the_device_has_had_it_meanwhile() -> None:
    device: set[Key] = set()
    tier = HostTier(PrefixHost(1), device)
    assert tier.take_over([("a", 1)]) == []
    tier.pin("r", ["a"])
    device.add("a")
    tier.arrived(["a"], 0, [2])
    device.remove("a")
    assert tier.take_over([("a", 2)]) == []
    assert tier.take_over([("b", 3)]) == ["b"], "there is room, but it is being read"
    tier.unpin("r")
    assert tier.take_over([("c", 4)]) == ["a"]


def test_without_a_prefix_cache_there_is_nothing_to_keep() -> None:
    with pytest.raises(ValueError, match="there is no prefix cache"):
        KVCache(8, 4, 0, None, PrefixHost(4))
    with pytest.raises(ValueError, match="-1 blocks"):
        PrefixHost(-1)


def test_what_a_spoilt_request_leaves_is_not_kept_in_host_memory() -> None:
    kv = KVCache(NUM_BLOCKS, SIZE, 0, HashIndex(), PrefixHost(6, HostWrites.BACK))
    scheduler = Scheduler(FCFS(), kv)
    prompt = (0, 1, 1, 0, 1)
    spoilt = Request("spoilt", 0.0, len(prompt), 2, prompt_token_ids=prompt)
    scheduler.add_request(spoilt)
    scheduler.update(scheduler.schedule(0.0), StepResult({"spoilt": 1}), 0.1)
    failed = StepResult({}, failed={"spoilt": "not a number"})
    scheduler.update(scheduler.schedule(0.1), failed, 0.2)
    assert spoilt.end_reason is EndReason.FAULT
    scheduler.add_request(Request("next", 0.2, len(prompt), 2, prompt_token_ids=prompt))
    batch = scheduler.schedule(0.3)
    assert (batch.swap_out, batch.swap_in) == ((), ())
    assert batch.chunks[0].num_prior_tokens == 0
