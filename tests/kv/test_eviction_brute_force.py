"""Random requests in every order of eviction, beside a model that only knows what blocks hold."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from operator import itemgetter

import pytest

from slosched.core import EndReason, Request, RequestStatus, ScheduledChunk
from slosched.kv import Eviction, Known, KVCache, RankedIndex
from slosched.kv.eviction.lines import Line
from slosched.kv.eviction.order import EvictionOrder, Rank
from slosched.kv.prefix.keys import Key, block_keys
from tests.factories import make_model
from tests.kv.test_prefix_cache import make

NUM_BLOCKS, SIZE = 24, 2
NUM_OPERATIONS = 1_500
SPARED_BLOCKS = 3
"""Blocks at the end of a line that `tail_lru` spares here; a real cache is larger."""


class Told(EvictionOrder):
    """An order, and what it has said of each line last."""

    def __init__(self, order: EvictionOrder) -> None:
        self.order = order
        self.last: dict[Line, Rank] = {}

    def note_arrived(self, path: Sequence[Line], now_s: float) -> None:
        self.order.note_arrived(path, now_s)

    def note_ended(self, request: Request, path: Sequence[Line], now_s: float) -> None:
        self.order.note_ended(request, path, now_s)

    def rank(self, line: Line, now_s: float) -> Rank:
        self.last[line] = rank = self.order.rank(line, now_s)
        return rank


class Player:
    """Plays random requests, and checks each answer of the KV cache by going through all blocks.

    Of a block only its key is known, which tells all blocks before it.
    """

    def __init__(self, eviction: Eviction, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.return_s: dict[str, float] = {}
        known = Known(NUM_BLOCKS, SIZE, make_model(), lambda r: self.return_s[r.request_id])
        self.index = eviction.new_index(known)
        self.kv = KVCache(NUM_BLOCKS, SIZE, 0, self.index)
        self.told: Told | None = None
        if isinstance(self.index, RankedIndex):
            if eviction is Eviction.TAIL_LRU:
                self.index._order._num_spared = SPARED_BLOCKS  # type: ignore[attr-defined]
            self.told = self.index._order = Told(self.index._order)
        self.eviction = eviction
        self.index_evict, self.index.evict = self.index.evict, self.evict  # type: ignore[method-assign]
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.keys: dict[str, Sequence[Key]] = {}
        self.before: dict[Key, Key | None] = {}
        """The key of the block before that of a key."""
        self.content: dict[int, Key] = {}
        """Key by block, for all blocks that the cache may find."""
        self.left: list[int] = []
        """Blocks that nobody holds, in the order in which they were left."""
        self.left_number: dict[Key, int] = {}
        self.num_released = 0
        self.ended: list[tuple[int, Sequence[Key], list[int]]] = []
        """Start number, keys and blocks of requests that ended since the last look."""
        self.start_number: dict[str, int] = {}
        self.num_started = 0
        self.arrival_number: dict[str, int] = {}
        self.num_evicted = 0
        self.num_requests = 0
        self.prompts: list[tuple[int, ...]] = []

    # What the cache says.

    def holders(self, block: int) -> int:
        return sum(block in table for table in self.kv.block_tables.values())

    def num_found(self, request: Request) -> int:
        """Return the number of first blocks of a waiting request that are cached."""
        most = (request.num_tokens - 1) // SIZE
        keys, here = self.keys[request.request_id][:most], set(self.content.values())
        return len(list(itertools.takewhile(here.__contains__, keys)))

    def check(self) -> None:
        self.kv.check()
        assert self.index.blocks() == {b: self.holders(b) for b in self.content}
        idle = [block for block in self.content if not self.holders(block)]
        assert sorted(idle) == sorted(self.left)
        held = {block for table in self.kv.block_tables.values() for block in table}
        assert self.kv.num_free_blocks == NUM_BLOCKS - len(held)
        here = set(self.content.values())
        assert all(before is None or before in here for before in map(self.before.get, here))

    def evict(self, count: int) -> list[tuple[Key, int]]:
        """Evict blocks one by one, and check of each that no other should have gone before it."""
        gone = []
        for _ in range(count):
            next_ones = self.next_ones()
            [(key, block)] = self.index_evict(1)
            assert self.content[block] == key
            assert block in next_ones
            self.left.remove(block)
            del self.content[block]
            gone.append((key, block))
        self.num_evicted += count
        return gone

    def next_ones(self) -> Sequence[int]:
        """Return the blocks of which one has to be evicted next."""
        if self.told is None:
            return self.left[:1]
        copies = list(self.content.values())
        spare = [block for block in self.left if copies.count(self.content[block]) > 1]
        if spare:
            return spare
        followed = {self.before[key] for key in copies}
        tails = {self.content[b]: b for b in self.left if self.content[b] not in followed}
        return self.ranked_lowest(tails, self.told)

    def ranked_lowest(self, tails: dict[Key, int], told: Told) -> Sequence[int]:
        """Return those of the `tails`, blocks by key, that the order says should go next."""
        index = self.index
        assert isinstance(index, RankedIndex)
        index._rank_again(index._changed())
        lines = {line.keys[line.cached_to - 1]: line for line in index._lines.all() if line.keys}
        ranks: dict[int, Rank] = {}
        for key, block in tails.items():
            ranks[block] = rank = told.last[lines[key]]
            assert rank.until_s > index._now_s
            self.check_rank(lines[key], rank, told.order.rank(lines[key], index._now_s))
        least = min(rank.value for rank in ranks.values())
        return [block for block, rank in ranks.items() if rank.value == least]

    def check_rank(self, line: Line, rank: Rank, fresh: Rank) -> None:
        """Check that a rank is what the order's docstring says, as far as nothing is learnt."""
        for name, number in line.users.items():
            assert name in self.waiting or name in self.running, "it has ended"
            assert number == self.arrival_number[name]
            assert self.keys[name][line.start : line.stop][-1] == line.last_key, "it parted"
        for name, request in self.waiting.items():
            if line.keys[line.cached_to - 1] in self.keys[name][: (request.num_tokens - 1) // SIZE]:
                assert name in line.users, "it waits for these blocks"
        for key in line.keys[line.start : line.cached_to]:
            assert line.left_number == self.left_number[key]
        if self.eviction is Eviction.TAIL_LRU:
            is_spared = line.cached_to > max(line.start, line.stop - SPARED_BLOCKS)
            assert rank.value == (float(not is_spared), float(line.left_number))
            return
        is_awaited = rank.value[0] == 2.0
        assert is_awaited is bool(line.users)
        if is_awaited:
            assert -rank.value[1] == min(line.users.values())
        if self.eviction is Eviction.BELADY:
            assert rank.value == fresh.value

    # What requests do.

    def look(self) -> None:
        """Ask what is cached, as each step does."""
        if len(self.ended) > 1:
            for _, keys, blocks in sorted(self.ended, key=itemgetter(0)):
                self.note_left(keys)
                for key, block in zip(reversed(keys), reversed(blocks), strict=True):
                    if block in self.left and self.content[block] == key:
                        self.left.remove(block)
                        self.left.append(block)
        self.ended.clear()
        for name, num_tokens in self.kv.prefixes.refresh():
            if name in self.waiting:
                self.waiting[name].num_computed_tokens = num_tokens
        for request in self.waiting.values():
            assert request.num_computed_tokens == SIZE * self.num_found(request)

    def arrive(self) -> None:
        self.num_requests += 1
        name, draw = f"r{self.num_requests}", self.random
        tokens = tuple(draw.choices(range(3), k=draw.randint(1, 20)))
        if self.prompts and draw.random() < 0.8:
            old = draw.choice(self.prompts[-12:])
            tokens = old[: draw.randint(1, len(old))] + tokens[: draw.choice((0, 1, 2, 9))]
        tokens = tokens[:30]
        self.prompts.append(tokens)
        request = make(name, tokens, len(tokens))
        request.arrival_s = self.now_s
        self.return_s[name] = draw.choice((math.inf, self.now_s + draw.randrange(40) / 8))
        self.note_keys(request)
        self.arrival_number[name] = self.num_requests
        self.waiting[name] = request
        self.kv.prefixes.watch(request)

    def note_keys(self, request: Request) -> None:
        keys = block_keys(request, SIZE).first(request.num_tokens // SIZE)
        self.keys[request.request_id] = keys = keys[: request.num_tokens // SIZE]
        self.before.update(zip(keys, (None, *keys), strict=False))

    def start(self) -> None:
        name = self.random.choice(list(self.waiting))
        request, tables = self.waiting[name], self.kv.block_tables
        self.look()
        num_found = request.num_computed_tokens // SIZE
        more = self.random.randint(1, request.num_tokens - request.num_computed_tokens)
        idle = sum(key in map(self.content.get, self.left) for key in self.keys[name][:num_found])
        blocks = -(-(num_found * SIZE + more) // SIZE) - num_found
        if blocks + idle > self.kv.num_free_blocks:
            return
        del self.waiting[name]
        self.running[name] = request
        self.num_started += 1
        self.start_number[name] = self.num_started
        request.status = RequestStatus.RUNNING
        self.kv.prefixes.start(name)
        table = tables[name]
        assert [self.content[b] for b in table] == list(self.keys[name][:num_found])
        self.left = [block for block in self.left if block not in table]
        self.compute(request, more)

    def go_on(self) -> None:
        request = self.running[self.random.choice(list(self.running))]
        if request.num_tokens == request.num_computed_tokens:
            if request.num_tokens >= 34:
                return
            request.output_token_ids.append(self.random.randrange(3))
            request.num_output_tokens += 1
            self.note_keys(request)
        more = self.random.randint(1, request.num_tokens - request.num_computed_tokens)
        held = len(self.kv.block_tables[request.request_id])
        blocks = -(-(request.num_computed_tokens + more) // SIZE) - held
        if blocks <= self.kv.num_free_blocks:
            self.look()
            self.compute(request, more)

    def compute(self, request: Request, more: int) -> None:
        name, prior = request.request_id, request.num_computed_tokens
        table = self.kv.grow(name, prior + more)
        request.num_computed_tokens = prior + more
        chunk = ScheduledChunk(request, more, prior, True, table)
        self.kv.prefixes.note_planned([chunk])
        self.kv.prefixes.note_computed([chunk])
        for place in range(prior // SIZE, (prior + more) // SIZE):
            self.content[table[place]] = self.keys[name][place]

    def leave(self, request: Request) -> list[int]:
        """Note which blocks a request leaves that nobody else holds; return all known ones."""
        table = self.kv.block_tables.get(request.request_id, [])
        known = [block for block in table if block in self.content]
        self.left += [block for block in reversed(known) if self.holders(block) == 1]
        if known:
            self.note_left(self.keys[request.request_id][: len(known)])
        return known

    def note_left(self, keys: Sequence[Key]) -> None:
        self.num_released += 1
        self.left_number.update(dict.fromkeys(keys, self.num_released))

    def preempt(self) -> None:
        name = self.random.choice(list(self.running))
        request = self.waiting[name] = self.running.pop(name)
        self.leave(request)
        self.kv.free(name)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens, request.num_preemptions = 0, request.num_preemptions + 1
        self.kv.prefixes.watch(request)

    def end(self, queue: dict[str, Request]) -> None:
        name = self.random.choice(list(queue))
        request = queue.pop(name)
        if blocks := self.leave(request):
            keys = self.keys[name][: len(blocks)]
            self.ended.append((self.start_number[name], keys, blocks))
        request.status, request.end_reason = RequestStatus.FINISHED, EndReason.STOP
        request.end_s = self.now_s
        self.kv.forget(name)

    def play(self) -> None:
        draw = self.random
        for _ in range(NUM_OPERATIONS):
            self.now_s += draw.choice((0, 0, 0.125, 0.125, 0.5, 3.0 * (draw.random() < 0.05)))
            kind = draw.random()
            if kind < 0.25 and len(self.waiting) < 8:
                self.arrive()
            elif kind < 0.45 and self.waiting:
                self.start()
            elif kind < 0.75 and self.running:
                self.go_on()
            elif kind < 0.80 and self.running:
                self.preempt()
            elif kind < 0.97 and self.running:
                self.end(self.running)
            elif self.waiting:
                self.end(self.waiting)
            self.check()
        for queue in (self.running, self.waiting):
            while queue:
                self.end(queue)
        self.look()
        self.check()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("eviction", list(Eviction))
def test_whatever_requests_do(eviction: Eviction, seed: int) -> None:
    player = Player(eviction, seed)
    player.play()
    assert player.num_evicted > 200
    assert player.kv.num_free_blocks == NUM_BLOCKS
