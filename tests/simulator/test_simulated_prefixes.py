"""Prefix caching in a replay: the hits, the time that they save, and the cost of tracking them."""

from __future__ import annotations

import timeit
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import DeadlineRule, Limits, Request, ScheduledBatch, ScheduledChunk, StepResult
from slosched.engine.loop import StepRecord
from slosched.kv import HashIndex, KVCache, PrefixCaching
from slosched.metrics import RequestRecord, summarize
from slosched.policy.engines.vllm_v1.policy import VLLMV1
from slosched.policy.fcfs import FCFS
from slosched.scheduler import Scheduler
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.workload.trace import Trace, TraceRequest
from tests.factories import make_model
from tests.machine import is_below

BLOCK_TOKENS = 10
"""Tokens of a prefix hash, which are no multiple of the KV blocks' 4."""


def make_trace(*prompts: tuple[float, int, Sequence[int]], num_output_tokens: int = 3) -> Trace:
    """Make a trace from (arrival_s, prompt tokens, prefix hashes) of each request."""
    lines = [
        TraceRequest(f"r{i}", at_s, tokens, num_output_tokens, prefix_hashes=tuple(hashes))
        for i, (at_s, tokens, hashes) in enumerate(prompts)
    ]
    return Trace.of(lines, "test", prefix_block_tokens=BLOCK_TOKENS)


def replayed(trace: Trace, caching: PrefixCaching, num_blocks: int = 1000) -> list[Request]:
    config = SimulationConfig(num_blocks=num_blocks, block_size=4, prefix_cache=caching)
    return simulate(trace, FCFS(), make_model(), config)


def test_a_prompt_that_begins_like_an_earlier_one_is_computed_from_there() -> None:
    trace = make_trace((0.0, 40, (1, 2, 3, 4)), (1.0, 40, (1, 2, 3, 9)), (2.0, 40, (7, 2, 3, 4)))
    steps: list[StepRecord] = []
    config = SimulationConfig(num_blocks=1000, block_size=4, prefix_cache=PrefixCaching.HASH)
    requests = simulate(trace, FCFS(), make_model(), config, on_step=steps.append)
    # The first 30 tokens are equal, which are 7 full blocks of 4.
    assert [r.num_cached_tokens for r in requests] == [0, 28, 0]
    chunks = [c for s in steps for c in s.batch.chunks if c.num_new_tokens > 1]
    assert [(c.num_new_tokens, c.num_prior_tokens) for c in chunks] == [(40, 0), (12, 28), (40, 0)]
    second = next(s.batch.shape for s in steps if chunks[1] in s.batch.chunks)
    assert second.num_prefill_tokens == 12
    assert second.prefill_attention_tokens == sum(28 + i for i in range(1, 13))
    plain = replayed(trace, PrefixCaching.OFF)
    assert [r.num_cached_tokens for r in plain] == [0, 0, 0]
    assert requests[0].token_times_s == plain[0].token_times_s
    assert requests[1].token_times_s[0] < plain[1].token_times_s[0]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    trace = make_trace((0.0, 20, (1, 2)), (1.0, 20, (1, 2)), (2.0, 21, (1, 2)))
    assert [r.num_cached_tokens for r in replayed(trace, PrefixCaching.HASH)] == [0, 16, 20]


def test_requests_that_run_at_once_share_blocks() -> None:
    """Three prompts of 40 tokens need 30 blocks; shared, they and their outputs fit into 22."""
    twins = [(1.0, 40, (1, 2, 3, 4))] * 3
    trace = make_trace((0.0, 40, (1, 2, 3, 4)), *twins, num_output_tokens=8)
    requests = replayed(trace, PrefixCaching.HASH, num_blocks=22)
    assert len({r.token_times_s[0] for r in requests[1:]}) == 1
    alone = replayed(trace, PrefixCaching.OFF, num_blocks=22)
    assert len({r.token_times_s[0] for r in alone[1:]}) == 2


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_in_a_large_cache_everything_is_found_that_was_ever_computed(
    hashes: list[list[int]],
) -> None:
    """Requests run one after the other and are compared with a set of all prefixes."""
    lines = [(float(i), BLOCK_TOKENS * len(h) - i % 3, h) for i, h in enumerate(hashes)]
    requests = replayed(make_trace(*lines), PrefixCaching.HASH)
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for request, (_, num_tokens, names) in zip(requests, lines, strict=True):
        tokens = [(at, tuple(names[: at // BLOCK_TOKENS + 1])) for at in range(num_tokens)]
        found = 0
        while found + 4 < num_tokens and seen.issuperset(tokens[found : found + 4]):
            found += 4
        assert request.num_cached_tokens == found
        seen.update(tokens[: num_tokens // 4 * 4])


def test_the_hit_rate_is_a_share_of_prompt_tokens() -> None:
    trace = make_trace((0.0, 40, (1, 2, 3, 4)), (1.0, 40, (1, 2, 3, 9)))
    records = [RequestRecord.from_request(r) for r in replayed(trace, PrefixCaching.HASH)]
    assert summarize(records, DeadlineRule.ENVELOPE).prefix_hit_rate == 28 / 80


NUM_WAITING, NUM_SHARED_TOKENS = 1000, 32_000


class Storm:
    """A thousand requests wait for a prefix of 32,000 tokens, which another computes in chunks."""

    def __init__(self, index: HashIndex) -> None:
        kv = KVCache(10_000, 16, 0, index)
        limits = Limits(max_num_batched_tokens=512, max_num_seqs=1)
        self.scheduler = Scheduler(VLLMV1(), kv, limits, make_model())
        hashes = tuple(range(NUM_SHARED_TOKENS // 512))
        for i in range(NUM_WAITING + 1):
            self.scheduler.add_request(
                Request(
                    *(f"r{i}", 0.0, NUM_SHARED_TOKENS + 100, 8),
                    prefix_hashes=(*hashes, NUM_SHARED_TOKENS + i),
                    prefix_block_tokens=512,
                )
            )
        self.step()

    def step(self) -> ScheduledBatch:
        batch = self.scheduler.schedule(0.0)
        self.scheduler.update(batch, StepResult({}), 0.0)
        return batch


@pytest.mark.cost
def test_a_thousand_who_wait_for_what_is_being_computed_cost_less_than_a_millisecond() -> None:
    """Every step changes the prefix match of every waiting request."""

    def median_s() -> float:
        storm = Storm(HashIndex())
        times_s = timeit.repeat(storm.step, number=1, repeat=21)
        waiting = storm.scheduler.queues.waiting.values()
        assert all(r.num_computed_tokens >= 21 * 512 for r in waiting)
        return sorted(times_s)[10]

    assert is_below(1e-3, median_s)


@pytest.mark.cost
def test_nobody_is_looked_at_whom_no_change_concerns() -> None:
    """The blocks that come and go match none of a thousand waiting requests."""
    kv = Storm(HashIndex()).scheduler.kv
    list(kv.prefixes.refresh())
    other = Request("other", 0.0, 9000, 8, prefix_hashes=(-1,) * 18, prefix_block_tokens=512)
    kv.prefixes.watch(other)
    list(kv.prefixes.refresh())
    kv.prefixes.start("other")
    computed = 0

    def one_more_block() -> None:
        nonlocal computed
        table = kv.grow("other", computed + 16)
        kv.prefixes.note_computed([ScheduledChunk(other, 16, computed, False, table)])
        computed += 16
        assert not list(kv.prefixes.refresh())

    assert is_below(100e-6, lambda: min(timeit.repeat(one_more_block, number=1, repeat=101)))
