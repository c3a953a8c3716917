"""A group of decodes reports and does what its decodes would report and do one by one."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from factories import make_request
from hypothesis import given
from hypothesis import strategies as st

from slosched.core import DeadlineRule, DecodeGroup, Request
from slosched.kv import KVCache
from slosched.simulator.decodes import GroupedDecodes

TICK_S = 2.0**-10
BLOCK_SIZE = 4


def make_decode(kv: KVCache, name: str, prompt: int, out: int, tpot_ticks: int) -> Request:
    """Make a running decode that has emitted `out` tokens, one a tick from tick 1 on."""
    request = make_request(name, prompt, 1000, ttft_s=8 * TICK_S, tpot_s=tpot_ticks * TICK_S)
    request.num_output_tokens = out
    request.output_token_ids = [0] * out
    request.token_times_s = [(i + 1) * TICK_S for i in range(out)]
    request.num_computed_tokens = prompt + out - 1
    kv.grow(name, request.num_computed_tokens)
    return request


def step_alone(kv: KVCache, request: Request, now_s: float, rule: DeadlineRule) -> None:
    request.num_computed_tokens += 1
    request.num_output_tokens += 1
    request.output_token_ids.append(0)
    request.token_times_s.append(now_s)
    request.deadline_s = rule.next_deadline_s(request)
    kv.grow(request.request_id, request.num_computed_tokens)


def blocks_needed(kv: KVCache, requests: list[Request]) -> int:
    held = kv.num_held_blocks
    return sum(-(-(r.num_computed_tokens + 1) // BLOCK_SIZE) - held(r.request_id) for r in requests)


def state(request: Request) -> tuple[object, ...]:
    return (
        request.num_computed_tokens,
        request.num_output_tokens,
        request.output_token_ids,
        request.token_times_s,
        request.deadline_s,
    )


decodes = st.tuples(
    st.integers(1, 30),  # prompt
    st.integers(1, 20),  # out
    st.integers(1, 4),  # TPOT
    st.integers(1, 12),  # left
    st.integers(0, 6),  # joins before this step
    st.integers(1, 30),  # its client leaves in this step, if it has not finished by then
)


@given(st.lists(decodes, min_size=1, max_size=6), st.sampled_from(DeadlineRule), st.integers(0, 8))
def test_the_group_is_the_sum_of_its_members(
    lines: list[tuple[int, int, int, int, int, int]], rule: DeadlineRule, asks_from: int
) -> None:
    grouped_kv, kv = (KVCache(400, BLOCK_SIZE) for _ in range(2))
    group: GroupedDecodes = GroupedDecodes(grouped_kv, rule)
    as_seen: DecodeGroup = group
    alone: dict[str, tuple[Request, int]] = {}
    twins: dict[str, Request] = {}
    now_s = 32 * TICK_S
    for step in range(20):
        for i, (prompt, out, tpot, left, start, _) in enumerate(lines):
            if start == step:
                name = f"r{i}"
                twin, single = (make_decode(k, name, prompt, out, tpot) for k in (grouped_kv, kv))
                for request in (twin, single):  # the last token came out in the step before
                    request.token_times_s[-1] = now_s
                    request.deadline_s = rule.next_deadline_s(request)
                group.join(twin, left)
                alone[name], twins[name] = (single, left), twin
        members = [request for request, left in alone.values() if left]
        if not members:
            continue
        contexts = [request.num_computed_tokens + 1 for request in members]
        assert as_seen.num_decodes == len(members)
        assert as_seen.context_tokens == sum(contexts)
        assert as_seen.max_context_tokens == max(contexts)
        assert as_seen.output_tokens == sum(request.num_output_tokens for request in members)
        assert as_seen.num_by_tpot_s == Counter(request.slo.tpot_s for request in members)
        assert as_seen.num_new_blocks == blocks_needed(kv, members)
        assert as_seen.first_deadline_s == min(request.deadline_s for request in members)
        if step >= asks_from:  # what is known by then has to be found anew
            assert as_seen.last_deadline_s == max(request.deadline_s for request in members)
        for ticks in range(1, 6):
            deadlines_s = [r.deadline_s for r in members if r.slo.tpot_s >= ticks * TICK_S]
            first_s = as_seen.first_deadline_from(ticks * TICK_S)
            assert first_s == min(deadlines_s, default=math.inf)
        now_s += (1 + step % 3) * TICK_S
        assert group.take_blocks()
        for i, (*_, leaves) in enumerate(lines):
            name = f"r{i}"
            if step == leaves and name in twins and twins[name] in group:
                request, _ = alone.pop(name)
                twin = twins.pop(name)
                group.leave(twin)
                request.num_computed_tokens += 1
                kv.grow(name, request.num_computed_tokens)
                assert state(twin) == state(request)
                grouped_kv.forget(name)
                kv.forget(name)
        members = [request for request in members if request.request_id in alone]
        for name, (request, left) in alone.items():
            if left:
                step_alone(kv, request, now_s, rule)
                alone[name] = (request, left - 1)
        finished = {request.request_id for request in group.advance((now_s,))}
        assert finished == {r.request_id for r in members if not alone[r.request_id][1]}
        assert grouped_kv.num_free_blocks == kv.num_free_blocks
        grouped_kv.check()
    group.book_all()
    for name, (request, _) in alone.items():
        assert state(twins[name]) == state(request)
        assert grouped_kv.num_held_blocks(name) == kv.num_held_blocks(name)
    grouped_kv.check()


@pytest.mark.parametrize("num_free", [0, 1, 2])
def test_a_step_takes_all_its_blocks_or_none(num_free: int) -> None:
    kv = KVCache(2 + num_free, BLOCK_SIZE)
    group = GroupedDecodes(kv, DeadlineRule.MEAN_TPOT)
    for name in ("a", "b"):
        group.join(make_decode(kv, name, 4, 1, 1), 9)
    assert group.num_new_blocks == 2
    assert group.take_blocks() == (num_free == 2)
    assert kv.num_free_blocks == num_free % 2


def test_no_promise_is_never_due() -> None:
    kv = KVCache(8, BLOCK_SIZE)
    group = GroupedDecodes(kv, DeadlineRule.ENVELOPE)
    request = make_decode(kv, "a", 4, 1, 1)
    request.slo = type(request.slo)(math.inf, math.inf)
    request.deadline_s = math.inf
    group.join(request, 3)
    group.advance((1.0,))
    assert group.first_deadline_s == math.inf
