"""trtllm against the numbers that NVIDIA's own unit tests of both schedulers assert.

`capacitySchedulerTest.cpp`, `microBatchSchedulerTest.cpp`: ten tokens a block, requests as (prompt,
output limit).  What slosched's requests support is played through the whole policy and the
Scheduler.  Draft tokens and prefix reuse, which they lack, go through the capacity schedulers
themselves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import pytest
from recorded_vllm import recorded

from slosched.core import Limits, Request, RequestStatus, StepResult
from slosched.kv import KVCache
from slosched.policy.engines.trtllm.micro_batch import chunk_sizes, drafts_kept
from slosched.policy.engines.trtllm.policy import (
    CAPACITY_SCHEDULERS,
    TRTLLM,
    ActiveRequest,
    Capacity,
    ContextChunking,
    MaxUtilization,
    Part,
    Room,
    WaitingQueue,
)
from slosched.scheduler import Scheduler

NO_EVICT, MAX_UTIL, STATIC = "guaranteed_no_evict", "max_utilization", "static_batch"
EVERY = (NO_EVICT, MAX_UTIL, STATIC)
FCFS, EQUAL = ContextChunking.FIRST_COME_FIRST_SERVED, ContextChunking.EQUAL_PROGRESS


class Step(NamedTuple):
    """One iteration: the requests that run, and those that are paused."""

    running: list[tuple[int, int, int, int]]
    """For each request: output limit, prompt and generated tokens, as the engine has them after a
    pause."""
    paused: list[int]

    @property
    def ids(self) -> list[int]:
        return [line[0] for line in self.running]


@dataclass
class Job:
    """A request of a unit test."""

    id: int
    prompt: int
    max_new: int
    at: int = 0
    priority: float = 0.5
    """The priority as in the engine, where higher numbers come first."""
    lora: str | None = None


class ChunksOf20:
    """A micro-batch scheduler that runs all that fit, with contexts in chunks of one size."""

    size = 20

    def schedule(self, fitting: Sequence[ActiveRequest], room: Room) -> list[Part]:
        del room
        return [Part(active, self.next_tokens(active.request)) for active in fitting]

    def next_tokens(self, request: Request) -> int:
        left = request.num_uncomputed_tokens
        return left if request.num_preemptions else min(self.size, left)


class ChunksOf40(ChunksOf20):
    size = 40


class Shown(MaxUtilization):
    """A capacity scheduler that keeps the order in which it last saw the requests."""

    order: ClassVar[list[int]] = []

    def schedule_request(self, active: Sequence[ActiveRequest], room: Room) -> Capacity:
        self.order[:] = [int(a.request.request_id) for a in active]
        return super().schedule_request(active, room)


@dataclass
class Replica:
    """The cache and the seats of a unit test, and the policy in front of them."""

    capacity: str
    num_tokens: int
    max_requests: int
    chunk: int | None = None
    """The chunk size, 20 or 40, that the test gives a request until it is paused."""
    max_loras: int | None = None
    max_num_active: int = 0
    queue: WaitingQueue = WaitingQueue.FCFS
    steps: list[Step] = field(default_factory=list)

    def policy(self) -> TRTLLM:
        return TRTLLM(
            self.capacity,
            waiting_queue_policy=self.queue,
            max_num_active=self.max_num_active,
            micro_batch_scheduler=f"{__name__}:ChunksOf{self.chunk}"
            if self.chunk
            else "token_budget",
        )

    def play(self, *jobs: Job) -> int:
        """Play the jobs and return the number of iterations; `steps` keeps each."""
        limits = Limits(10_000, self.max_requests, max_loras=self.max_loras)
        kv = KVCache(-(-self.num_tokens // 10), 10)
        scheduler = Scheduler(self.policy(), kv, limits)
        paused: dict[str, int] = {}
        while scheduler.num_unfinished or any(job.at >= len(self.steps) for job in jobs):
            for job in jobs:
                if job.at == len(self.steps):
                    scheduler.add_request(as_request(job))
            before = {r.request_id: r.num_output_tokens for r in scheduler.unfinished()}
            batch = scheduler.schedule(float(len(self.steps)))
            paused.update((name, before[name]) for name in batch.output.preempted)
            lines = []
            for chunk in batch.chunks:
                of, kept = chunk.request, paused.get(chunk.request.request_id, 0)
                limit, prompt = of.max_tokens - kept, of.num_prompt_tokens + kept
                line = (int(of.request_id), limit, prompt, of.num_output_tokens - kept)
                lines.append(line)
            self.steps.append(Step(sorted(lines), [int(n) for n in batch.output.preempted]))
            emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
            scheduler.update(batch, StepResult(emitted), float(len(self.steps)))
            kv.check()
        return len(self.steps)


def as_request(job: Job) -> Request:
    return Request(
        str(job.id),
        float(job.at),
        job.prompt,
        job.max_new,
        priority=-round(10 * job.priority),
        lora_id=job.lora,
    )


def twins(prompt: int, max_new: int, first: int = 0, at: int = 0) -> tuple[Job, Job]:
    return Job(first, prompt, max_new, at), Job(first + 1, prompt, max_new, at)


@pytest.mark.parametrize("capacity", EVERY)
def test_what_fits_runs_at_once(capacity: str) -> None:
    assert Replica(capacity, 200, 2).play(*twins(10, 80)) == 80
    assert Replica(capacity, 200, 2, chunk=20).play(*twins(50, 40)) == 42
    tasks = [Job(i, 10, 50, lora=task) for i, task in enumerate("ABA")]
    assert Replica(capacity, 210, 4, max_loras=2).play(*tasks) == 50


def test_max_utilization_pauses_the_one_that_began_last() -> None:
    replica = Replica(MAX_UTIL, 100, 2)
    assert replica.play(*twins(10, 80)) == 119
    assert replica.steps[40].running == [(0, 80, 10, 40), (1, 80, 10, 40)]
    assert replica.steps[41].running == [(0, 80, 10, 41)]
    assert replica.steps[41].paused == [1]
    assert replica.steps[80].running == [(1, 39, 51, 0)]


def test_max_utilization_with_priorities() -> None:
    replica = Replica(MAX_UTIL, 100, 2, queue=WaitingQueue.PRIORITY)
    assert replica.play(Job(1, 10, 80, priority=0.6), Job(0, 10, 80)) == 119
    assert replica.steps[41].running == [(1, 80, 10, 41)]


def test_max_utilization_with_chunks() -> None:
    replica = Replica(MAX_UTIL, 100, 2, chunk=20)
    assert replica.play(*twins(30, 60)) == 100
    assert replica.steps[22].running == [(0, 60, 30, 21)]
    assert replica.steps[61].running == [(1, 39, 51, 0)]
    assert Replica(MAX_UTIL, 100, 2, chunk=40).play(*twins(70, 20)) == 42


def test_no_evict_waits_for_blocks_to_completion() -> None:
    replica = Replica(NO_EVICT, 100, 2)
    assert replica.play(*twins(10, 80)) == 160
    assert [step.ids for step in replica.steps] == [[0]] * 80 + [[1]] * 80
    assert Replica(NO_EVICT, 100, 2, chunk=20).play(*twins(30, 60)) == 122


def test_max_utilization_with_two_more_in_between() -> None:
    replica = Replica(MAX_UTIL, 100, 4)
    assert replica.play(*twins(10, 80), *twins(10, 80, first=2, at=10)) == 227
    after = {21: [0, 1], 41: [0], 80: [1, 2], 90: [1], 119: [2, 3], 139: [2], 178: [3]}
    assert {it: replica.steps[it].ids for it in after} == after


def test_max_utilization_with_two_more_of_higher_priority() -> None:
    replica = Replica(MAX_UTIL, 100, 4, queue=WaitingQueue.PRIORITY)
    dear = Job(2, 10, 80, 10, priority=0.6), Job(3, 10, 80, 10, priority=0.7)
    assert replica.play(*twins(10, 80), *dear) == 227
    after = {21: [0, 2, 3], 31: [2, 3], 51: [3], 90: [2], 129: [0, 1], 139: [0], 178: [1]}
    assert {it: replica.steps[it].ids for it in after} == after


def test_those_of_higher_priority_take_the_seats() -> None:
    replica = Replica(MAX_UTIL, 100, 2, queue=WaitingQueue.PRIORITY, max_num_active=4)
    dear = Job(2, 10, 10, 2, priority=0.6), Job(3, 10, 10, 2, priority=0.7)
    assert replica.play(*twins(10, 10), *dear) == 20
    assert replica.steps[2].ids == [2, 3]
    assert replica.steps[2].paused == [1, 0]
    assert replica.steps[12].running == [(0, 8, 12, 0), (1, 8, 12, 0)]


def test_no_evict_with_two_more_in_between() -> None:
    more = twins(10, 80, first=2, at=10)
    assert Replica(NO_EVICT, 100, 4).play(*twins(10, 80), *more) == 320
    more = twins(30, 60, first=2, at=10)
    assert Replica(NO_EVICT, 100, 4, chunk=20).play(*twins(30, 60), *more) == 244


@pytest.mark.parametrize(
    ("capacity", "iterations"), [(MAX_UTIL, 150), (NO_EVICT, 100), (STATIC, 100)]
)
def test_one_adapter_at_a_time(capacity: str, iterations: int) -> None:
    tasks = [Job(i, 10, 50, lora=task) for i, task in enumerate("ABA")]
    assert Replica(capacity, 210, 4, max_loras=1).play(*tasks) == iterations


def test_a_static_batch_ends_before_the_next_begins() -> None:
    replica = Replica(STATIC, 200, 2)
    assert replica.play(Job(0, 10, 80), Job(1, 10, 40), Job(2, 10, 80)) == 160
    assert replica.steps[41].ids == [0]
    assert [step.ids for step in replica.steps[80:]] == [[2]] * 80


def test_the_active_ones_are_in_order_of_priority_then_of_arrival() -> None:
    view = Scheduler(TRTLLM(), KVCache(100, 10), Limits(max_num_seqs=2)).view(0.0)
    policy = TRTLLM(
        f"{__name__}:Shown", waiting_queue_policy=WaitingQueue.PRIORITY, max_num_active=12
    )
    priorities = [0.5, 0.5, 0.6, 0.6, 0.6, 1, 0.3, 0.3, 0.3, 0.6, 1, 0.5]
    waiting = [as_request(Job(i, 10, 20, priority=p)) for i, p in enumerate(priorities)]
    policy.schedule(replace(view, waiting=waiting))
    assert Shown.order == [5, 10, 2, 3, 4, 9, 0, 1, 11, 6, 7, 8]
    old = [as_request(Job(i, 10, 10)) for i in (0, 1)]
    for request in old:
        request.status, request.num_computed_tokens, request.num_output_tokens = (
            RequestStatus.RUNNING,
            10,
            1,
        )
    dear = [
        as_request(Job(2, 10, 10, 2, priority=0.6)),
        as_request(Job(3, 10, 10, 2, priority=0.7)),
    ]
    policy.schedule(replace(view, running=old, waiting=dear))
    assert Shown.order == [3, 2, 0, 1]


WORKLOADS = recorded("trtllm_workloads.jsonl.gz")


@pytest.mark.parametrize("workload", WORKLOADS)
def test_random_workloads_are_decided_as_by_the_model_behind_the_numbers(
    workload: dict[str, Any],
) -> None:
    """Compares which requests run and pause in every iteration; the model also gives the numbers
    above."""
    jobs = [Job(*values) for values in workload["jobs"]]
    queue = WaitingQueue.PRIORITY if workload["by_priority"] else WaitingQueue.FCFS
    limits = (workload["seats"], workload["chunk"], workload["max_loras"], 99, queue)
    for capacity, steps in workload["steps"].items():
        # the model ends as soon as no request is left
        in_time = [j for j in jobs if j.at < len(steps)]
        ours = Replica(capacity, 10 * workload["num_blocks"], *limits)
        ours.play(*in_time)
        assert [[step.ids, step.paused] for step in ours.steps] == steps


@dataclass
class Prompted:
    """A request with what slosched's own lack: draft tokens, and a text to reuse."""

    request: Request
    text: Sequence[Hashable]
    num_draft_tokens: int = 0
    chunk: int | None = None
    num_held_blocks: int = 0

    def blocks(self) -> list[Hashable]:
        """Return the full blocks of the prompt; its last token is never reused."""
        return [tuple(self.text[: 10 * i]) for i in range(1, (len(self.text) - 1) // 10 + 1)]

    def as_active(self, stored: set[Hashable]) -> ActiveRequest:
        request = self.request
        is_generation = request.num_output_tokens > 0 and request.num_uncomputed_tokens == 1
        new = [block for block in self.blocks() if block not in stored]
        new_block = new[0] if new and not is_generation else None
        return ActiveRequest(
            request, is_generation, self.num_held_blocks, self.num_draft_tokens, new_block
        )


@dataclass
class ReusingReplica:
    """Carries out what a capacity scheduler decides; a context is stored once it is computed."""

    capacity: str
    num_blocks: int
    max_requests: int
    stored: set[Hashable] = field(default_factory=set)
    num_reused: int = 0
    steps: list[list[tuple[int, int]]] = field(default_factory=list)
    """The requests that ran, with the tokens that each had generated before."""

    def play(self, *jobs: Prompted) -> int:
        """Play the jobs and return the number of iterations."""
        scheduler, left = CAPACITY_SCHEDULERS[self.capacity](), list(jobs)
        cache, limits = KVCache(self.num_blocks, 10), Limits(10_000, self.max_requests)
        while left:
            of = {p.request.request_id: p for p in left}
            view = Scheduler(TRTLLM(), cache, limits).view(0.0)
            num_free = self.num_blocks - sum(p.num_held_blocks for p in left)
            active = [p.as_active(self.stored) for p in left]
            fitting, paused = scheduler.schedule_request(active, Room(view, num_free))
            for victim in paused:
                prompted = of[victim.request.request_id]
                prompted.num_held_blocks, prompted.chunk = 0, None
                victim.request.num_computed_tokens = 0
            running = sorted(fitting, key=lambda a: a.request.request_id)
            self.steps.append(
                [(int(a.request.request_id), a.request.num_output_tokens) for a in running]
            )
            for part in running:
                self.run(of[part.request.request_id])
            left = [p for p in left if p.request.num_output_tokens < p.request.max_tokens]
        return len(self.steps)

    def run(self, prompted: Prompted) -> None:
        request = prompted.request
        if not prompted.num_held_blocks:
            prompted.num_held_blocks = -(-request.num_tokens // 10)
            known = itertools.takewhile(self.stored.__contains__, prompted.blocks())
            num_reused = len(list(known))
            self.num_reused += num_reused
            request.num_computed_tokens = 10 * num_reused
        wanted = request.num_uncomputed_tokens
        request.num_computed_tokens += min(wanted, prompted.chunk or wanted)
        if not request.num_uncomputed_tokens:
            if not request.num_output_tokens:
                self.stored.update(prompted.blocks())
            request.num_output_tokens += 1
            blocks = -(-request.num_computed_tokens // 10)
            prompted.num_held_blocks = max(prompted.num_held_blocks, blocks)


def drafting(id_: int, num_draft_tokens: int) -> Prompted:
    return Prompted(as_request(Job(id_, 10, 80)), [], num_draft_tokens)


def test_max_utilization_keeps_blocks_for_drafted_tokens() -> None:
    replica = ReusingReplica(MAX_UTIL, 10, 2)
    assert replica.play(drafting(0, 5), drafting(1, 10)) == 129
    assert replica.steps[31] == [(0, 31)]


def test_a_context_that_comes_from_elsewhere_takes_the_same_blocks() -> None:
    """A disaggregated generation looks like a first chunk to the capacity scheduler."""
    replica = ReusingReplica(MAX_UTIL, 10, 2)
    assert replica.play(drafting(0, 0), drafting(1, 0)) == 119


def telling(id_: int, text: Sequence[Hashable], max_new: int, chunk: int | None = None) -> Prompted:
    return Prompted(as_request(Job(id_, len(text), max_new)), text, chunk=chunk)


@pytest.mark.parametrize(("capacity", "iterations"), [(MAX_UTIL, 3), (NO_EVICT, 3), (STATIC, 2)])
def test_who_would_compute_the_same_prefix_waits_for_it(capacity: str, iterations: int) -> None:
    replica = ReusingReplica(capacity, 20, 3)
    assert replica.play(*(telling(i, range(21), 2) for i in range(3))) == iterations
    assert replica.num_reused == 4


@pytest.mark.parametrize("capacity", [MAX_UTIL, NO_EVICT])
def test_prefixes_of_prompts_in_chunks_and_of_nested_prompts(capacity: str) -> None:
    replica = ReusingReplica(capacity, 20, 2)
    assert replica.play(*(telling(i, range(50), 40, chunk=20) for i in range(2))) == 43
    assert replica.num_reused == 4
    others = [telling(i, range(i + 1, i + 12 + 10 * i), 80) for i in range(2)]
    nested = [telling(2 + i, range(10 * i + 11), 80) for i in range(3)]
    replica = ReusingReplica(capacity, 100, 5)
    assert replica.play(*others, *nested) == 82
    assert replica.num_reused == 3
    assert [i for i, _ in replica.steps[0]] == [0, 1, 2]
    assert [i for i, _ in replica.steps[1]] == [0, 1, 2, 3]


def series(
    policy: ContextChunking,
    lengths: Sequence[int],
    unit: int,
    most: float = math.inf,
    longest: float = math.inf,
) -> list[list[int]]:
    """Return the context computed after each iteration, until all is computed or nothing moves."""
    done, history = [0] * len(lengths), []
    while any(left := [n - d for n, d in zip(lengths, done, strict=True)]):
        open_ = [i for i, n in enumerate(left) if n]
        sizes = chunk_sizes(policy, [left[i] for i in open_], unit, most, longest)
        for i, size in zip(open_, sizes, strict=True):
            done[i] += size
        history.append(list(done))
        if not any(sizes):
            break
    return history


BOTH_CHUNKED = [
    (([25, 25], 20), [[25, 25]]),
    (([25, 25], 100, math.inf, 20), [[0, 0]]),
    (([10, 25], 10, math.inf, 20), [[10, 20], [10, 25]]),
    (([25, 25], 20, 20), [[20, 0], [25, 0], [25, 20], [25, 25]]),
    (([25, 25], 20, 10), [[0, 0]]),
    (([25, 15], 5, 30, 10), [[10, 10], [20, 15], [25, 15]]),
]
CHUNKED = [
    *((policy, case, want) for case, want in BOTH_CHUNKED for policy in (EQUAL, FCFS)),
    (EQUAL, ([25, 25], 5, 30), [[15, 15], [25, 25]]),
    (FCFS, ([25, 25], 5, 30), [[25, 5], [25, 25]]),
    (EQUAL, ([25, 15], 5, 30), [[15, 15], [25, 15]]),
    (FCFS, ([25, 15], 5, 30), [[25, 5], [25, 15]]),
    (EQUAL, ([25, 25], 5, 15), [[10, 5], [20, 10], [25, 20], [25, 25]]),
    (FCFS, ([25, 25], 5, 15), [[15, 0], [25, 5], [25, 20], [25, 25]]),
]


@pytest.mark.parametrize(("policy", "case", "expected"), CHUNKED)
def test_contexts_are_cut(
    policy: ContextChunking, case: tuple[list[int], int], expected: list[list[int]]
) -> None:
    assert series(policy, *case) == expected


@pytest.mark.parametrize("policy", [EQUAL, FCFS])
@pytest.mark.parametrize(
    ("lengths", "unit", "most", "longest", "drafts", "expected"),
    [
        ([27, 27], 5, 30, math.inf, 5, [3, 3]),
        ([23, 17], 5, 20, math.inf, 5, [0, 0]),
        ([6, 6], 5, 30, 10, 5, [4, 4]),
        ([25, 25], 5, 50, math.inf, 5, [0, 0]),
        ([25, 25], 10, 30, math.inf, 5, [5, 5]),
        ([4127], 64, math.inf, 4128, 3, [1]),
        ([2041], 64, math.inf, math.inf, 8, [7]),
        ([3, 3, 3], 16, 40, 64, 17, [13, 13, 5]),
    ],
)
def test_a_last_chunk_keeps_the_drafts_that_fill_its_unit(
    policy: ContextChunking,
    lengths: list[int],
    unit: int,
    most: float,
    longest: float,
    drafts: int,
    expected: list[int],
) -> None:
    left, kept = dict(enumerate(lengths)), {}
    while left:
        wanted = list(left.values())
        sizes = chunk_sizes(policy, wanted, unit, most, longest)
        keeps = drafts_kept([drafts] * len(wanted), wanted, sizes, unit, most, longest)
        assert any(sizes)
        for i, size, keep in zip(list(left), sizes, keeps, strict=True):
            left[i] -= size
            if not left[i]:
                kept[i] = keep
                del left[i]
    assert [kept[i] for i in range(len(lengths))] == expected
