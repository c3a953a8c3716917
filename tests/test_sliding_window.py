"""Requests give back the KV blocks that no token sees any more, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_model, make_request
from hypothesis import given, settings
from hypothesis import strategies as st

from slosched.core import Limits, PreemptionMode, Request, SchedulerOutput, SchedulerView, fan_out
from slosched.engine.checked_memory import CheckedMemory
from slosched.engine.loop import Engine
from slosched.kv import NO_PREFIX_HOST, HashIndex, KVCache, PrefixCaching
from slosched.policy import FCFS, POLICIES
from slosched.policy.spec import make_policy
from slosched.scheduler import Scheduler
from slosched.simulator.drafts import SimulatedDrafts
from slosched.simulator.simulate import SimulationConfig, simulate
from slosched.simulator.simulated import SimulatedExecutor, VirtualClock
from slosched.testing import Scenario, play, scenarios
from slosched.testing.random_scenarios import group_scenarios
from slosched.workload import Trace, TraceRequest

SIZE = 4


class Replica:
    """A scheduler with a simulated device that checks what each block holds."""

    def __init__(self, window_tokens: int, *, num_blocks: int = 64, **limits: object) -> None:
        self.kv = KVCache(num_blocks, SIZE, 64, window_tokens=window_tokens)
        self.clock = VirtualClock()
        self.scheduler = Scheduler(FCFS(), self.kv, Limits(**limits), make_model())
        device = SimulatedExecutor(make_model(), self.clock, {})
        checked = CheckedMemory(device, SIZE, window_tokens)
        self.engine = Engine(self.scheduler, checked, self.clock)

    def step(self) -> None:
        self.engine.step()
        self.kv.check()


def unseen(request: Request, window_tokens: int) -> int:
    """Return how many first blocks the next token does not see, counted token by token."""
    first_seen = max(0, request.num_computed_tokens - window_tokens + 1)
    return sum(
        all(position < first_seen for position in range(SIZE * block, SIZE * (block + 1)))
        for block in range(request.num_computed_tokens)
    )


@pytest.mark.parametrize("window_tokens", [1, 2, 3, 4, 5, 9, 100])
def test_a_request_holds_its_window_and_no_more(window_tokens: int) -> None:
    """In chunks of 7, then decodes; the last block stays, although a window of 1 needs none."""
    replica = Replica(window_tokens, max_num_batched_tokens=7)
    request = make_request(num_prompt_tokens=23, max_tokens=30)
    replica.scheduler.add_request(request)
    most_held = 0
    while replica.engine.has_work:
        before = min(
            unseen(request, window_tokens), max(0, request.num_computed_tokens - 1) // SIZE
        )
        replica.step()
        held = replica.kv.num_held_blocks(request.request_id)
        if not request.status.is_ended:
            assert held == -(-request.num_computed_tokens // SIZE) - before
            most_held = max(most_held, held)
    needed = -(-(window_tokens - 1 + 7) // SIZE) + 1
    assert most_held <= min(needed, -(-53 // SIZE))
    assert replica.kv.num_free_blocks == replica.kv.num_blocks


@pytest.mark.parametrize("mode", PreemptionMode)
def test_what_was_given_back_makes_room_for_others(mode: PreemptionMode) -> None:
    """Six requests of 40 tokens run in 30 blocks, where three would fit without the window."""
    runs = []
    for window_tokens in (8, 1000):
        limits = {"max_num_batched_tokens": 16, "preemption_mode": mode}
        replica = Replica(window_tokens, num_blocks=30, **limits)
        for i in range(6):
            replica.scheduler.add_request(make_request(f"r{i}", 20, max_tokens=20))
        requests = list(replica.scheduler.queues.waiting.values())
        num_steps = 0
        while replica.engine.has_work:
            replica.step()
            num_steps += 1
        runs.append((num_steps, sum(request.num_preemptions for request in requests)))
        assert all(request.num_output_tokens == 20 for request in requests)
    (num_steps, num_preemptions), (num_steps_all, num_preemptions_all) = runs
    assert num_preemptions == 0 < num_preemptions_all
    assert num_steps < num_steps_all


def test_a_swapped_request_copies_and_holds_its_window_alone() -> None:
    replica = Replica(8)
    request = make_request(num_prompt_tokens=40, max_tokens=8)
    replica.scheduler.add_request(request)
    replica.step()
    replica.step()
    kv, name = replica.kv, request.request_id
    assert (kv.num_held_blocks(name), request.num_computed_tokens) == (3, 41)
    assert len(kv.swap_out(name)) == 3
    assert (kv.num_held_blocks(name), kv.num_held_host_blocks(name)) == (0, 3)
    assert kv.ledger().num_ready_blocks(name) == 8, "the first eight are not needed again"
    assert kv.num_free_blocks == kv.num_blocks
    kv.check()
    assert len(kv.swap_in(name)) == 3
    assert (kv.num_held_blocks(name), kv.num_held_host_blocks(name)) == (3, 0)
    assert kv.ledger().num_ready_blocks(name) == 11
    assert kv.ledger().leave(name) == 3
    kv.check()
    while replica.engine.has_work:
        replica.step()
    assert kv.num_free_blocks == kv.num_blocks


def test_blocks_that_others_may_share_stay() -> None:
    assert KVCache(8, SIZE, prefix_index=HashIndex(), window_tokens=8).window_tokens is None
    replica = Replica(8)
    members = fan_out(make_request("a", num_prompt_tokens=40, max_tokens=8), 2)
    alone = make_request("b", num_prompt_tokens=40, max_tokens=8)
    replica.scheduler.add_request(members[0])
    replica.scheduler.add_request(alone)
    for _ in range(3):
        replica.step()
    held = [replica.kv.num_held_blocks(request.request_id) for request in (*members, alone)]
    assert held == [11, 11, 3]
    while replica.engine.has_work:
        replica.step()
    assert replica.kv.num_free_blocks == replica.kv.num_blocks


@settings(max_examples=8)
@given(scenarios(), st.sampled_from([1, 2, 5, 12, 40]))
@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_obeys_the_laws(name: str, scenario: Scenario, window_tokens: int) -> None:
    """Also without a prefix cache, with which requests keep their blocks."""
    windowed = replace(scenario, window_tokens=window_tokens)
    play(make_policy(name), windowed)
    bare = replace(windowed, prefix_cache=PrefixCaching.OFF, prefix_host=NO_PREFIX_HOST)
    play(make_policy(name), bare)


@settings(max_examples=30)
@given(group_scenarios(), st.sampled_from([1, 2, 5, 12]), st.sampled_from([0, 2]))
def test_groups_and_drafts_obey_the_laws(
    scenario: Scenario, window_tokens: int, num_drafts: int
) -> None:
    drafts = SimulatedDrafts(num_drafts, 0.6) if num_drafts else None
    windowed = replace(scenario, window_tokens=window_tokens, drafts=drafts)
    play(FCFS(), replace(windowed, prefix_cache=PrefixCaching.OFF, prefix_host=NO_PREFIX_HOST))


class SeesAll(FCFS):
    """FCFS that counts the blocks that it sees the running requests hold."""

    most_held = 0

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        held = sum(view.kv.num_held_blocks(request.request_id) for request in view.running)
        assert view.kv.num_free_blocks == view.kv.num_blocks - held
        self.most_held = max(self.most_held, held)
        return super().schedule(view)


def test_policies_see_the_true_number_of_blocks() -> None:
    replica = Replica(8, max_num_batched_tokens=16)
    policy = replica.scheduler.policy = SeesAll()
    for i in range(4):
        replica.scheduler.add_request(make_request(f"r{i}", 30, max_tokens=12))
    while replica.engine.has_work:
        replica.step()
    assert 9 <= policy.most_held <= 4 * 3 + 16 // SIZE, "without a window these are 44"


@pytest.mark.parametrize("policy", ["fcfs", "goodput", "sarathi"])
def test_a_simulated_window_serves_more_at_once(policy: str) -> None:
    """These policies are simulated with their decodes as a group where there is no window."""
    requests = [
        TraceRequest(f"r{i}", 0.0, num_prompt_tokens=256, num_output_tokens=64) for i in range(40)
    ]
    trace = Trace.of(requests, "same")
    plain = SimulationConfig(num_blocks=100, block_size=16)
    ends_s = {
        window: max(
            request.end_s or 0.0
            for request in simulate(
                trace, make_policy(policy), make_model(), replace(plain, window_tokens=window)
            )
        )
        for window in (None, 64, 10_000)
    }
    assert ends_s[64] < 0.7 * ends_s[None]
    assert ends_s[10_000] == pytest.approx(ends_s[None])
