"""Orders of eviction: whatever they rank, no block goes that is needed, and what each promises."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slosched.core import SLO, Limits, RequestStatus, ScheduledChunk
from slosched.kv import Eviction, HashIndex, Known, KVCache, PrefixCaching, PrefixHost, RankedIndex
from slosched.kv.eviction.life_table import LifeTable
from slosched.kv.eviction.lines import Line, Lines
from slosched.kv.eviction.order import EvictionOrder, Rank
from slosched.kv.prefix.keys import Key
from slosched.perfmodel import load_model
from slosched.policy.spec import make_policy
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.testing import Scenario, scenarios
from slosched.testing.laws import check_laws
from slosched.workload import Tiers, synthesize
from slosched.workload.lengths import Fixed
from slosched.workload.sessions import Sessions
from slosched.workload.trace import Trace, TraceRequest
from tests.factories import make_model
from tests.kv.test_prefix_cache import SIZE, RadixMachine, make

RANKED = [eviction for eviction in Eviction if eviction is not Eviction.LRU]
IN_THE_DARK = [eviction for eviction in RANKED if eviction is not Eviction.BELADY]
"""The orders that do not know the future."""


class Recency(EvictionOrder):
    """What `HashIndex` does, as a rank: what was left longest ago goes first."""

    def rank(self, line: Line, now_s: float) -> Rank:
        return Rank((0.0, float(line.left_number)))


class Dice(EvictionOrder):
    """Any line may go at any time."""

    def __init__(self) -> None:
        self._random = random.Random(1)

    def rank(self, line: Line, now_s: float) -> Rank:
        down_to = self._random.randint(line.start, line.cached_to - 1)
        return Rank((0.0, self._random.random()), now_s + self._random.random(), down_to)


class LastRanked(EvictionOrder):
    """What was ranked last goes last, so that an order that learns could rank anew at any time."""

    def __init__(self) -> None:
        self._num_ranked = 0

    def rank(self, line: Line, now_s: float) -> Rank:
        self._num_ranked += 1
        return Rank((0.0, float(self._num_ranked)))


def known(num_blocks: int = 100, block_size: int = 4) -> Known:
    return Known(num_blocks, block_size, make_model())


class RankedMachine(RadixMachine):
    """The rules of every prefix cache, where lines are evicted in any order.

    Blocks are found once they are planned, and duplicates are kept, so the model only notes what has
    gone: never a block that a request holds, and never one before another that stays.
    """

    new_index = staticmethod(lambda: RankedIndex(Dice()))  # type: ignore[assignment]

    def notice(self, name: str, more: int, prior: int) -> None:
        self.forget_what_went()
        super(RadixMachine, self).notice(name, more, prior)

    def forget_what_went(self) -> None:
        here = self.index.blocks()
        gone = [block for block in self.cached if block not in here]
        assert not self.may_not_go.intersection(gone)
        for block in gone:
            self.drop(block)
        self.may_not_go = set()
        kept = set(self.cached.values())
        assert all(prefix[:-SIZE] in kept for prefix in kept if len(prefix) > SIZE)

    def drop(self, block: int) -> None:
        if block in self.left:
            self.left.remove(block)
        del self.cached[block]
        for step in self.steps:
            step.blocks.discard(block)

    def finish(self, names: Sequence[str]) -> None:
        for name in names:
            self.requests[name].end_s = 0.0
        super().finish(names)


TestRankedCache = RankedMachine.TestCase
TestRankedCache.settings = settings(stateful_step_count=40)


def serve(kv: KVCache, tokens: Sequence[int], name: str, at_s: float, lasts_s: float = 0.0) -> int:
    """Serve a prompt alone; return the number of its blocks that were found."""
    request = make(name, tuple(tokens), len(tokens))
    request.arrival_s = at_s
    kv.prefixes.watch(request)
    found = dict(kv.prefixes.refresh())[name]
    kv.prefixes.start_all([name])
    chunk = ScheduledChunk(request, len(tokens) - found, found, True, kv.grow(name, len(tokens)))
    kv.prefixes.note_planned([chunk])
    kv.prefixes.take_copies()
    kv.prefixes.note_computed([chunk])
    request.status, request.end_s = RequestStatus.FINISHED, at_s + lasts_s
    kv.forget(name)
    kv.check()
    return found // kv.block_size


def test_what_is_loaded_from_the_host_is_known_to_be_waited_for() -> None:
    """The one that waits for three blocks on the host comes after one that loads two of them."""
    index = RankedIndex(Recency())
    kv = KVCache(6, 4, 0, index, PrefixHost(20))
    prefix = [1] * 12
    assert serve(kv, [*prefix, 9], "first", 0.0) == 0
    assert serve(kv, [7] * 21, "evicts all of it", 1.0) == 0
    waits = make("waits", (*prefix, 8), 13)
    kv.prefixes.watch(waits)
    assert dict(kv.prefixes.refresh()) == {"waits": 12}
    assert serve(kv, [*prefix[:8], 5], "loads", 3.0) == 2
    assert [line.users.keys() for line in index._lines.all() if line.stop == 2] == [{"waits"}]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30))
def test_ranked_by_recency_the_index_evicts_what_lru_does(prompts: list[list[int]]) -> None:
    """So all that an order changes is the order.

    One token more than full blocks leaves no duplicate, which a ranked index would evict first.
    """
    caches = [KVCache(7, 2, 0, index) for index in (HashIndex(), RankedIndex(Recency()))]
    for place, blocks in enumerate(prompts):
        tokens = [*itertools.chain(*([block] * 2 for block in blocks)), 0]
        found = [serve(kv, tokens, f"r{place}", float(place)) for kv in caches]
        assert found[0] == found[1]
        tables = [sorted(kv.prefixes.index.blocks()) for kv in caches]
        assert tables[0] == tables[1]


@pytest.mark.parametrize("eviction", IN_THE_DARK)
@settings(max_examples=8, deadline=None)
@given(scenario=scenarios())
def test_the_laws_of_policies_hold_in_every_order(eviction: Eviction, scenario: Scenario) -> None:
    changed = replace(scenario, prefix_cache=PrefixCaching.HASH, eviction=eviction)
    for name in ("fcfs", "goodput"):
        check_laws(partial(make_policy, name), changed, conserves_work=False)


def agents(num_requests: int, rate: float) -> Trace:
    """Return sessions of agents with prompts an eighth as long, to keep replays short."""
    trace = synthesize("agents", num_requests=num_requests, rate=rate, seed=3)
    return trace.with_lengths_scaled(1 / 8).with_slo(Tiers((SLO(10.0, 0.5),), (1.0,)))


@pytest.mark.parametrize(
    "eviction",
    [
        pytest.param(one, marks=() if one in (Eviction.BELADY, Eviction.SAGA) else pytest.mark.slow)
        for one in RANKED
    ],
)
def test_two_replays_of_sessions_are_equal_and_every_turn_ends(eviction: Eviction) -> None:
    config = SimulationConfig(
        num_blocks=1500, prefix_cache=PrefixCaching.HASH, eviction=eviction, num_host_blocks=0
    )
    trace = agents(100, 2.0)
    runs = [simulate(trace, make_policy("fcfs"), make_model(), config) for _ in range(2)]
    assert all(request.status.is_ended for request in runs[0])
    assert [r.token_times_s for r in runs[0]] == [r.token_times_s for r in runs[1]]
    assert sum(r.num_cached_tokens for r in runs[0]) > 0


def misses(eviction: Eviction, visits: Sequence[int], num_blocks: int) -> int:
    """Return the misses of visits to prompts of one block each, one second apart."""
    lines = [
        TraceRequest(f"r{place}", float(place), 5, 1, prefix_hashes=(visit,), session_id=str(visit))
        for place, visit in enumerate(visits)
    ]
    trace = Trace.of(lines, "visits", prefix_block_tokens=4)
    config = SimulationConfig(
        num_blocks=num_blocks, block_size=4, prefix_cache=PrefixCaching.HASH, eviction=eviction
    )
    requests = simulate(trace, make_policy("fcfs"), make_model(), config)
    return sum(not request.num_cached_tokens for request in requests)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("other", [e for e in Eviction if e is not Eviction.BELADY])
def test_belady_misses_least_where_blocks_are_of_one_size(other: Eviction, seed: int) -> None:
    visits = random.Random(seed).choices(range(12), k=150)
    assert misses(Eviction.BELADY, visits, 8) <= misses(other, visits, 8)


@pytest.mark.parametrize("counts", [(1, 1, 1, 1, 1, 1), (1, 2, 3), (4, 2)])
def test_blocks_go_in_the_same_order_at_once_and_bit_by_bit(counts: Sequence[int]) -> None:
    def gone(counts: Sequence[int]) -> list[tuple[Key, int]]:
        index = RankedIndex(LastRanked())
        kv = KVCache(20, 4, 0, index)
        serve(kv, prompt(1, 4), "a", 0.0)
        serve(kv, prompt(2, 4), "b", 1.0)
        return [pair for count in counts for pair in index.evict(count)]

    assert gone(counts) == gone((6,))


def test_ttl_evicts_the_same_whether_decodes_take_their_blocks_together_or_one_by_one() -> None:
    sessions = Sessions(
        mean_turns=4.0, think_s=0.3, question=Fixed(300), answer=Fixed(20), system_tokens=512
    )
    trace = synthesize("sessions", num_requests=60, rate=30.0, sessions=sessions, seed=171)
    config = SimulationConfig(
        limits=Limits(max_num_seqs=32),
        num_blocks=1000,
        prefix_cache=PrefixCaching.HASH,
        eviction=Eviction.TTL,
    )
    model, policy = load_model("h100/llama-3.1-8b"), make_policy("fcfs")
    together = simulate(trace, policy, model, config)
    one_by_one = simulate(trace, policy, model, config, on_step=lambda _: None)
    assert [r.token_times_s for r in together] == [r.token_times_s for r in one_by_one]


def test_belady_keeps_what_is_used_next_where_lru_loses_everything() -> None:
    visits = list(itertools.islice(itertools.cycle(range(9)), 90))
    assert misses(Eviction.LRU, visits, 8) == 90
    assert misses(Eviction.BELADY, visits, 8) < 45


def test_belady_lets_go_of_what_the_next_turn_does_not_need_as_soon_as_that_comes() -> None:
    """The second turn of a session keeps two of eight blocks, and needs the room of the others.

    What another session asks again later is not touched, though it was left earlier.
    """

    def row(name: str, at_s: float, session: str, hashes: Sequence[int]) -> TraceRequest:
        return TraceRequest(name, at_s, 33, 1, prefix_hashes=tuple(hashes), session_id=session)

    lines = [
        row("later", 0.0, "b", range(100, 108)),
        row("first", 2.0, "a", range(8)),
        row("parts", 10.0, "a", [0, 1, *range(50, 56)]),
        row("again", 20.0, "b", range(100, 108)),
    ]
    trace = Trace.of(lines, "a turn that parts", prefix_block_tokens=4)
    caching, order = PrefixCaching.HASH, Eviction.BELADY
    config = SimulationConfig(num_blocks=18, block_size=4, prefix_cache=caching, eviction=order)
    requests = simulate(trace, make_policy("fcfs"), make_model(), config)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 8, 32]


def prompt(number: int, num_blocks: int) -> list[int]:
    """Return a prompt of this many full blocks of four tokens, and one token more."""
    return [number] * (4 * num_blocks + 1)


def cache(eviction: Eviction, num_blocks: int) -> KVCache:
    return KVCache(num_blocks, 4, 0, PrefixCaching.HASH.new_index(eviction, known(num_blocks)))


def test_ttl_lets_go_first_what_has_outlived_its_time() -> None:
    kv = cache(Eviction.TTL, 60)
    at_s = 0.0
    for turn in range(40):  # pauses of a second, so that nothing is worth keeping much longer
        serve(kv, prompt(1, 10), f"a{turn}", at_s)
        at_s += 1.0
    serve(kv, prompt(2, 20), "old", at_s)
    serve(kv, prompt(3, 20), "new", at_s + 50.0)
    serve(kv, prompt(4, 25), "big", at_s + 50.5)
    assert serve(kv, prompt(3, 20), "new again", at_s + 50.6) == 20
    assert serve(kv, prompt(2, 20), "old again", at_s + 51.0) < 20


def test_tail_lru_takes_a_tail_of_everything_before_all_of_anything() -> None:
    index = PrefixCaching.HASH.new_index(Eviction.TAIL_LRU, Known(1000, 64))
    kv = KVCache(400, 64, 0, index)
    for name, number in (("a", 1), ("b", 2)):
        serve(kv, [number] * (64 * 150 + 1), name, float(number))
    serve(kv, [3] * (64 * 200 + 1), "c", 3.0)
    found = [serve(kv, [n] * (64 * 150 + 1), f"again {n}", 3.0 + n) for n in (1,)]
    # The 5,192 tokens at the end of a prompt are spared: 81 blocks, of which both lose some.
    assert found[0] >= 150 - 81


def test_saga_keeps_sessions_that_go_on_where_lru_keeps_what_is_asked_once() -> None:
    """Two sessions take turns, and what is asked once in between is more than fits beside them."""

    def found(eviction: Eviction) -> list[int]:
        kv = cache(eviction, 48)
        blocks, at_s = [], 0.0
        for turn in range(25):
            for number in (1, 2):
                at_s += 1.0
                blocks.append(serve(kv, prompt(number, 15), f"{number}-{turn}", at_s))
            for once in range(2):
                at_s += 1.0
                serve(kv, prompt(100 + 2 * turn + once, 10), f"once-{turn}-{once}", at_s)
        return blocks[-10:]

    assert found(Eviction.SAGA) == [15] * 10
    assert max(found(Eviction.LRU)) < 15


def test_saga_lets_go_first_what_stays_away_longer_than_others_do() -> None:
    kv = cache(Eviction.SAGA, 60)
    at_s = 0.0
    for turn in range(40):  # pauses of a second
        serve(kv, prompt(1, 10), f"a{turn}", at_s)
        at_s += 1.0
    serve(kv, prompt(3, 30), "large and new", at_s + 50.0)
    serve(kv, prompt(4, 25), "other", at_s + 50.5)
    assert serve(kv, prompt(3, 30), "again", at_s + 50.6) == 30
    assert serve(kv, prompt(1, 10), "old again", at_s + 51.0) < 10


def test_saved_time_learns_that_what_is_asked_once_does_not_come_back() -> None:
    """Two prompts take turns while more than the cache holds is asked once in between."""

    def found(eviction: Eviction) -> int:
        kv = cache(eviction, 48)
        total, at_s = 0, 0.0
        for turn in range(60):
            for number in (1, 2):
                at_s += 1.0
                total += serve(kv, prompt(number, 15), f"{number}-{turn}", at_s)
            for once in range(4):
                at_s += 1.0
                serve(kv, prompt(100 + 4 * turn + once, 10), f"once-{turn}-{once}", at_s)
        return total

    assert found(Eviction.SAVED_TIME) > 1.5 * found(Eviction.LRU)


def test_saved_time_keeps_the_prompt_for_which_a_request_waits() -> None:
    kv = cache(Eviction.SAVED_TIME, 50)
    serve(kv, prompt(1, 20), "a", 0.0)
    serve(kv, prompt(2, 20), "b", 1.0)
    waiting = make("a again", tuple(prompt(1, 20)), 81)
    waiting.arrival_s = 2.0
    kv.prefixes.watch(waiting)
    serve(kv, prompt(3, 25), "c", 3.0)
    kv.prefixes.start("a again")
    assert kv.num_held_blocks("a again") == 20


@pytest.mark.parametrize("eviction", [e for e in RANKED if e is not Eviction.TAIL_LRU])
def test_what_was_computed_after_a_request_came_that_waits_for_it_is_kept(
    eviction: Eviction,
) -> None:
    """Of two requests with a new document the second one still waits when the first has ended."""
    kv = KVCache(50, 4, 0, eviction.new_index(replace(known(50), known_return=lambda _: math.inf)))
    kv.prefixes.watch(make("second", tuple(prompt(1, 20)), 81))
    serve(kv, prompt(1, 20), "first", 0.0, 1.0)
    for number in range(2, 6):
        serve(kv, prompt(number, 20), f"other {number}", 2.0 * number)
    kv.prefixes.refresh()
    kv.prefixes.start("second")
    assert kv.num_held_blocks("second") == 20


def test_of_what_requests_wait_for_a_preempted_one_loses_its_blocks_last() -> None:
    """It is the first in line, though nothing of its prompt was cached when it arrived."""
    kv = cache(Eviction.SAVED_TIME, 50)
    serve(kv, prompt(2, 20), "b", 0.0)
    first, tokens = make("first", tuple(prompt(1, 20)), 81), 81
    kv.prefixes.watch(first)
    kv.prefixes.refresh()
    kv.prefixes.start("first")
    chunk = ScheduledChunk(first, tokens, 0, True, kv.grow("first", tokens))
    kv.prefixes.note_planned([chunk])
    kv.prefixes.note_computed([chunk])
    for name, number in (("second", 2), ("third", 4)):
        later = make(name, tuple(prompt(number, 20)), 81)
        later.arrival_s = 1.0
        kv.prefixes.watch(later)
    kv.free("first")
    kv.prefixes.watch(first)
    serve(kv, prompt(3, 20), "c", 2.0)
    kv.prefixes.start("first")
    assert kv.num_held_blocks("first") == 20


def test_the_tail_of_a_session_is_not_kept_for_a_request_that_went_another_way() -> None:
    """While that one waited for what both begin with, the session went on and ended."""
    kv = cache(Eviction.TTL, 50)
    common, session = prompt(1, 5)[:20], [*prompt(1, 5)[:20], *prompt(2, 10)]
    serve(kv, [*common, 0], "a", 0.0)
    other = make("other", (*common, *prompt(3, 10)), 61)
    other.arrival_s = 1.0
    kv.prefixes.watch(other)
    serve(kv, session, "b", 2.0)
    kv.prefixes.refresh()
    kv.prefixes.start("other")
    chunk = ScheduledChunk(other, 41, 20, True, kv.grow("other", 61))
    kv.prefixes.note_planned([chunk])
    kv.prefixes.note_computed([chunk])
    other.status, other.end_s = RequestStatus.FINISHED, 3.0
    kv.forget("other")
    for place in range(5):
        serve(kv, prompt(10 + place, 20), f"later {place}", 10_000.0 + place)
    assert serve(kv, session, "b again", 10_010.0) == 0


def test_a_rank_that_changes_again_at_the_same_time_is_asked_for_once() -> None:
    """A prompt that is idle from 9.9 s on is 8 s old at 17.9 s, but 17.9 - 9.9 is less than 8."""
    kv = cache(Eviction.SAVED_TIME, 50)
    serve(kv, prompt(1, 20), "a", 9.9)
    serve(kv, prompt(2, 20), "b", 10.0)
    serve(kv, prompt(3, 25), "c", 17.9)
    assert kv.num_free_blocks == 50


def line() -> Line:
    return Line(None, (), 0, 1, 0, 0, 0)


def test_the_life_table_waits_for_what_returns_after_a_fixed_time() -> None:
    table, now_s, one = LifeTable(), 0.0, line()
    for _ in range(200):
        table.leave(one, now_s)
        now_s += 5.0
        table.advance(now_s)
        table.come_back(one, now_s)
    table.leave(one, now_s)
    assert table.rate(one, now_s + 3.0)[0] > table.rate(one, now_s)[0] > 0.1


def test_the_life_table_sees_that_who_stays_away_long_has_gone() -> None:
    table, draw = LifeTable(), random.Random(0)
    now_s = 0.0
    for _ in range(2000):
        one = line()
        table.leave(one, now_s)
        if draw.random() < 0.9:
            now_s += draw.expovariate(0.5)
            table.advance(now_s)
            table.come_back(one, now_s)
    one = line()
    table.leave(one, now_s)
    soon, until_s = table.rate(one, now_s + 1.0)
    assert 0.3 < soon < 0.6  # 90 % come back, at 0.5 a second
    assert until_s > now_s + 1.0
    late, _ = table.rate(one, now_s + 40.0)
    assert late < 0.1 * soon


def test_an_order_that_lacks_what_it_needs_says_so() -> None:
    with pytest.raises(ValueError, match="belady has to know"):
        PrefixCaching.HASH.new_index(Eviction.BELADY, known())
    with pytest.raises(ValueError, match="latency model"):
        PrefixCaching.HASH.new_index(Eviction.TTL, Known(10, 16))
    for kind in (PrefixCaching.OFF, PrefixCaching.RADIX, PrefixCaching.MERGED):
        with pytest.raises(ValueError, match="only the prefix cache hash"):
            kind.new_index(Eviction.SAVED_TIME, known())


def test_lru_is_the_index_that_there_always_was() -> None:
    assert type(PrefixCaching.HASH.new_index(Eviction.LRU)) is HashIndex


def idle_lines(index: RankedIndex) -> int:
    return len(index._queue)


def test_the_queue_does_not_grow_with_the_number_of_requests() -> None:
    kv = KVCache(100, 4, 0, index := RankedIndex(Recency()))
    for turn in range(3000):
        serve(kv, prompt(turn % 3, 5), f"r{turn}", float(turn))
    assert idle_lines(index) < 600


def test_a_line_that_is_found_again_keeps_what_it_follows() -> None:
    """A prompt that returns in parts meets what is remembered of it behind a line that is not.

    Two prompts part after four blocks and are evicted.  One of them comes back and is interrupted
    after two blocks, which forgets the line of the four, and after all four.
    """
    lines, one, other = Lines(), list(range(8)), [*range(4), 14, 15]
    lines.extended(one, 8, "r")
    head, tail = lines.extended(other, 6, "r")
    for line in (*lines.path(one, 8)[1:], tail, head):
        lines.shorten(line, line.start)
    lines.extended(one, 2, "r")
    lines.extended(one, 4, "r")
    first, second = lines.extended(one, 8, "r")
    assert (first.stop, second.start, second.parent) == (4, 4, first)
    assert (first.num_children, first.num_cached_children) == (1, 1)
    lines.shorten(second, 4)
    assert lines.freed[-1] is first


def test_a_line_that_is_found_again_is_not_kept_for_who_has_ended_meanwhile() -> None:
    """A request waits for a prompt that is evicted.  A prompt parts from it where no key is left."""
    lines, one, other = Lines(), list(range(8)), [*range(4), 14, 15]
    lines.extended(one, 8, "r")
    head, tail = lines.extended(other, 6, "r")
    for line in (*lines.path(one, 8), tail):
        line.users["waits"] = 1
    for line in (*lines.path(one, 8)[1:], tail, head):
        lines.shorten(line, line.start)
    lines.extended(one, 2, "r")
    for line in lines.path(one, 8):
        line.users.pop("waits", None)
    lines.extended(one, 4, "r")
    assert not any(line.users for line in lines.extended(one, 8, "r"))


def test_a_line_for_which_many_requests_wait_is_ranked_once_for_all() -> None:
    """Its rank asks who of them came first, which for each would take the square of their number."""

    class Counting(Recency):
        num_ranked = 0

        def rank(self, line: Line, now_s: float) -> Rank:
            self.num_ranked += 1
            return super().rank(line, now_s)

    kv = KVCache(100, 4, 0, RankedIndex(order := Counting()))
    for place in range(200):
        kv.prefixes.watch(make(f"waits {place}", tuple(prompt(1, 20)), 81))
    serve(kv, prompt(1, 20), "first", 0.0)
    assert len(kv.prefixes.refresh()) == 200
    assert order.num_ranked < 20
    serve(kv, prompt(1, 20), "second", 1.0)
    assert kv.prefixes.refresh() == [], "they wait for it already"
