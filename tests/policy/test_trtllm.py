"""trtllm beyond the engine's numbers: what it refuses, where it goes on, schedulers of your own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pytest
from factories import make_model

from slosched.core import NO_SLO, EndReason, Limits, Request, StepResult
from slosched.kv import KVCache
from slosched.policy.engines.trtllm.policy import (
    TRTLLM,
    ActiveRequest,
    Capacity,
    ContextChunking,
    Part,
    Room,
    TokenBudget,
    WaitingQueue,
)
from slosched.policy.spec import PolicySpecError, make_policy
from slosched.scheduler import Scheduler
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.testing import check_policy
from slosched.workload import Trace, TraceRequest

NO_EVICT, MAX_UTIL, STATIC = "guaranteed_no_evict", "max_utilization", "static_batch"
FCFS, EQUAL = ContextChunking.FIRST_COME_FIRST_SERVED, ContextChunking.EQUAL_PROGRESS


def part(num_tokens: int, *, is_generation: bool = False, drafts: int = 0) -> ActiveRequest:
    request = Request("0", 0.0, 100, 100)
    request.num_computed_tokens = 100 - num_tokens
    return ActiveRequest(request, is_generation, 10, drafts)


def test_the_micro_batch_ends_at_the_first_that_does_not_fit() -> None:
    def chosen(most: int, *fitting: ActiveRequest) -> list[int]:
        view = Scheduler(TRTLLM(), KVCache(9, 10), Limits(most, 4)).view(0.0)
        parts = TokenBudget().schedule(fitting, Room(view, 9))
        assert sum(p.num_tokens + p.num_draft_tokens for p in parts) <= most
        return [fitting.index(p.active) for p in parts]

    context, decode = partial(part, 10), partial(part, 1, is_generation=True)
    assert chosen(15, context(), context(), decode()) == [0]
    assert chosen(12, context(), decode(), decode(), decode()) == [0, 1, 2]
    assert chosen(128, decode(), decode(drafts=63)) == [0, 1]
    assert chosen(64, decode(), decode(drafts=63)) == [0]
    assert chosen(99, *(decode() for _ in range(6))) == [0, 1, 2, 3]


class Played(NamedTuple):
    steps: list[dict[str, int]]
    reasons: dict[str, EndReason | None]


def play(policy: TRTLLM, requests: Sequence[Request], kv: KVCache, limits: Limits) -> Played:
    """Return what each step computed, until all requests have ended."""
    scheduler = Scheduler(policy, kv, limits)
    steps: list[dict[str, int]] = []
    reasons: dict[str, EndReason | None] = {}
    for request in requests:
        scheduler.add_request(request)
    while scheduler.num_unfinished:
        assert len(steps) < 1000
        batch = scheduler.schedule(float(len(steps)))
        steps.append(dict(batch.output.num_scheduled_tokens))
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        scheduler.update(batch, StepResult(emitted), float(len(steps)))
        reasons.update((r.request_id, r.end_reason) for r in scheduler.take_ended())
    return Played(steps, reasons)


@pytest.mark.parametrize(
    ("policy", "first"), [(EQUAL, {"a": 10, "b": 5}), (FCFS, {"a": 15}), (ContextChunking.NONE, {})]
)
def test_contexts_share_a_step_in_units_of_a_block(
    policy: ContextChunking, first: dict[str, int]
) -> None:
    requests = [Request(name, 0.0, 25, 3) for name in "ab"]
    played = play(TRTLLM(context_chunking_policy=policy), requests, KVCache(60, 5), Limits(15))
    assert played.steps[0] == first
    is_cut = policy is not ContextChunking.NONE
    assert set(played.reasons.values()) == {EndReason.LENGTH if is_cut else EndReason.TOO_LONG}


def test_a_step_smaller_than_a_unit_still_moves() -> None:
    policy = TRTLLM(context_chunking_policy=EQUAL)
    played = play(policy, [Request("a", 0.0, 25, 2)], KVCache(9, 20), Limits(10))
    assert played.steps == [{"a": 10}, {"a": 10}, {"a": 5}, {"a": 1}]


def test_a_paused_one_that_has_grown_longer_than_a_step_still_ends() -> None:
    """Without chunking, the engine would never get it into a step again."""
    requests = [Request(name, at, 10, 80) for at, name in enumerate("ab")]
    played = play(TRTLLM("max_utilization"), requests, KVCache(10, 10), Limits(20))
    assert {"b": 20} in played.steps
    assert set(played.reasons.values()) == {EndReason.LENGTH}
    assert [r.num_preemptions for r in requests] == [0, 1]


def test_no_evict_reserves_what_may_be_emitted_and_max_utilization_does_not() -> None:
    def most_at_once(capacity: str) -> int:
        outputs = [128, *[8] * 15]
        lines = [TraceRequest(f"r{i}", 0.0, 64, n, NO_SLO) for i, n in enumerate(outputs)]
        trace = Trace.of(lines, "one of sixteen is long, and nobody knows which")
        seen: list[int] = []
        config = SimulationConfig(num_blocks=24)
        simulate(
            trace,
            TRTLLM(capacity),
            make_model(),
            config,
            on_step=lambda s: seen.append(s.num_running),
        )
        return max(seen)

    assert most_at_once("guaranteed_no_evict") == 2  # 12 blocks each
    assert most_at_once("max_utilization") >= 4


class Everyone:
    """A user's micro-batch scheduler: all that fit, with all that they have to compute."""

    def schedule(self, fitting: Sequence[ActiveRequest], room: Room) -> list[Part]:
        del room
        return [Part(active, active.request.num_uncomputed_tokens) for active in fitting]


class OneAtATime:
    """A user's capacity scheduler that has state."""

    def __init__(self) -> None:
        self.num_asked = 0

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        del room
        self.num_asked += 1
        begun = [a for a in active if a.has_begun]
        return Capacity((begun or list(active))[:1], ())


def test_ones_own_schedulers_are_named_in_the_spec_and_reset() -> None:
    spec = f"trtllm:capacity_scheduler_policy={__name__}:OneAtATime"
    policy = make_policy(spec)
    assert isinstance(policy, TRTLLM)
    requests = [Request(name, 0.0, 10, 3) for name in "ab"]
    played = play(policy, requests, KVCache(60, 10), Limits())
    assert played.steps == [{"a": 10}, {"a": 1}, {"a": 1}, {"b": 10}, {"b": 1}, {"b": 1}]
    own = policy._capacity
    policy.reset()
    assert isinstance(own, OneAtATime)
    assert own.num_asked == 6
    assert policy._capacity is not own


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("capacity_scheduler_policy=no_evict", "guaranteed_no_evict, max_utilization"),
        ("capacity_scheduler_policy=no_such_module:Mine", "No module named"),
        ("micro_batch_scheduler=slosched.batch:Nobody", "micro_batch_scheduler"),
        (f"micro_batch_scheduler={__name__}:OneAtATime", "it has no method schedule$"),
        ("max_num_active=-1", "max_num_active must be at least 0, not -1"),
        ("max_context_length=0", "max_context_length must be >= 1, not 0"),
        ("context_chunking_policy=all", "first_come_first_served"),
    ],
)
def test_what_is_no_option_says_what_there_is(options: str, complaint: str) -> None:
    with pytest.raises(PolicySpecError, match=complaint):
        make_policy(f"trtllm:{options}")


LAWS: dict[str, Callable[[], TRTLLM]] = {
    "max utilization": partial(TRTLLM, MAX_UTIL),
    "max utilization, equal progress": partial(TRTLLM, MAX_UTIL, EQUAL, 16),
    "no evict, in chunks, by priority": partial(
        TRTLLM, NO_EVICT, FCFS, waiting_queue_policy=WaitingQueue.PRIORITY, max_num_active=20
    ),
    "static batch": partial(TRTLLM, STATIC, EQUAL),
    "ones own": partial(
        TRTLLM, f"{__name__}:OneAtATime", micro_batch_scheduler=f"{__name__}:Everyone"
    ),
}


@pytest.mark.parametrize("name", LAWS)
def test_every_combination_obeys_the_laws(name: str) -> None:
    check_policy(LAWS[name], max_examples=10, conserves_work=False)
