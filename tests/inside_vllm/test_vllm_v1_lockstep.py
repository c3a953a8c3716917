"""vllm_v1 in slosched's own scheduler against vLLM's, step by step, on random workloads and
options.

One side is what a simulation runs, the other is vLLM itself; they share only the arrivals.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

import vllm
from packaging.version import Version
from real_vllm import STOP_TOKEN, Loop, Step, Workload, make_config, make_scheduler, random_workload
from vllm.config import LoRAConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as VLLMScheduler

from slosched.core import (
    Limits,
    Request,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerView,
    StepResult,
)
from slosched.kv import KVCache
from slosched.policy.engines.vllm_v0.policy import SchedulingPolicy
from slosched.policy.engines.vllm_v1.policy import VLLMV1
from slosched.scheduler import Scheduler

NUM_SYNC, NUM_ASYNC = 300, 150
NUM_LORAS = 3
HAS_NEW_RULES = Version(vllm.__version__) >= Version("0.33")
"""The first version with two new rules, which `vllm_v1` does not follow. vLLM goes on behind a
request that, as the least urgent, preempted itself; and an adapter keeps its place while its
request waits for the last token."""


@dataclass(frozen=True)
class Case:
    """A workload, the options of both sides, and what vLLM's arrivals do not contain."""

    workload: Workload
    options: dict[str, Any]
    interval: int
    priorities: dict[str, int]
    adapters: dict[str, int]
    max_loras: int | None


def is_under_new_rules(case: Case, *, is_async: bool) -> bool:
    if not HAS_NEW_RULES:
        return False
    return case.max_loras is not None if is_async else case.options["policy"] == "priority"


def random_case(seed: int, *, is_roomy: bool = False) -> Case:
    """Return a case in which each option has its default with a chance of at least one half."""
    rng = random.Random(f"options {seed}")
    workload = random_workload(seed)
    if is_roomy:
        workload = replace(workload, num_blocks=2000)
    may_chunk = rng.random() < 0.8
    if not may_chunk:  # vLLM requires this
        tokens = max(workload.max_num_batched_tokens, workload.max_model_len)
        workload = replace(workload, max_num_batched_tokens=tokens)
    has_adapters = rng.random() < 0.2
    names = [arrival.request_id for arrival in workload.arrivals]
    return Case(
        workload,
        {
            "policy": rng.choice(["fcfs", "priority"]),
            "long_prefill_token_threshold": rng.choice([0, 0, 4, 16]),
            "long_prefill_token_threshold_adaptive": rng.random() < 0.3,
            "enable_chunked_prefill": may_chunk,
            "scheduler_reserve_full_isl": rng.random() < 0.6,
            "watermark": rng.choice([0.0, 0.0, 0.1, 0.3]),
            "max_num_active_seqs": rng.choice([0, 0, 1, 2]),
        },
        1 if is_roomy else rng.choice([1, 1, 1, 2, 4]),
        {name: rng.randint(0, 2) for name in names},
        {name: rng.randint(0, NUM_LORAS) if has_adapters else 0 for name in names},
        rng.choice([1, 2]) if has_adapters else None,
    )


def run_vllm(case: Case, *, is_async: bool) -> list[Step]:
    options = case.options | {"max_num_active_seqs": case.options["max_num_active_seqs"] or None}
    config = make_config(case.workload, is_async=is_async, **options)
    if case.max_loras is not None:
        config.lora_config = LoRAConfig(max_loras=case.max_loras, max_lora_rank=8)
    theirs = make_scheduler(AsyncScheduler if is_async else VLLMScheduler, config)
    add, schedule, cadence = theirs.add_request, theirs.schedule, Cadence(theirs, case.interval)

    def add_request(request: Any) -> None:
        request.priority = case.priorities[request.request_id]
        request.arrival_time = float(request.request_id[1:])
        if adapter := case.adapters[request.request_id]:
            request.lora_request = LoRARequest(f"adapter{adapter}", adapter, "/nowhere")
        add(request)

    theirs.add_request = add_request
    theirs.schedule = lambda: schedule(cadence.is_throttled())
    return Loop(theirs, case.workload, is_async).run()


class Cadence:
    """The steps in which prompts have their turn: vLLM's engines count them, here `vllm_v1` says
    so."""

    def __init__(self, host: Any, interval: int) -> None:
        self._host = host
        self._interval = interval
        self._num_steps = 0

    def is_throttled(self) -> bool:
        if not self._host.running:
            self._num_steps = 0
        is_throttled = self._num_steps % self._interval != 0
        self._num_steps += 1
        return is_throttled


class SeesFinishing(VLLMV1):
    """vLLM lets a request keep its seat until its last token is known; slosched fills it at once."""

    scheduler: Scheduler

    @property
    def num_finishing(self) -> int:
        return len(self.scheduler.queues.finishing)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        limits = self._with_active_seats(view).limits
        num_seats = limits.max_num_seqs - self.num_finishing
        if num_seats <= 0:
            return SchedulerOutput()
        return super().schedule(replace(view, limits=replace(limits, max_num_seqs=num_seats)))

    def _longest_chunk(self, view: SchedulerView, num_decodes: int) -> int | None:
        return super()._longest_chunk(view, num_decodes + self.num_finishing)


class Ours:
    """slosched's side of the same calls."""

    def __init__(self, case: Case) -> None:
        workload = case.workload
        self.case = case
        options = case.options | {"policy": SchedulingPolicy(case.options["policy"])}
        policy = SeesFinishing(**options, prefill_schedule_interval=case.interval)
        # vLLM's block 0 holds nothing.
        self.kv = KVCache(workload.num_blocks - 1, workload.block_size)
        limits = Limits(
            workload.max_num_batched_tokens, workload.max_num_seqs, max_loras=case.max_loras
        )
        self.scheduler = policy.scheduler = Scheduler(policy, self.kv, limits)
        self.num_calls = 0
        self._tokens = Loop(None, workload, is_async=False)
        self._running: ScheduledBatch | None = None

    def call(self, *, is_async: bool) -> dict[str, Any]:
        """Return what is decided and what comes out, in the terms of `Step`."""
        for arrival in self.case.workload.arrivals:
            if arrival.call == self.num_calls:
                self.scheduler.add_request(self._request(arrival))
        self.num_calls += 1
        now_s = float(self.num_calls)
        scheduler, running = self.scheduler, self._running
        if running is not None:
            scheduler.foresee(running, now_s)
        batch = scheduler.schedule(now_s, None if running is None else now_s)
        self._running = None if batch.is_empty else batch
        returned = running
        if not is_async:
            returned, self._running = self._running, None
        queues = scheduler.queues
        decided: dict[str, Any] = {
            "scheduled": list(batch.output.num_scheduled_tokens.items()),
            "preempted": sorted(batch.output.preempted),
        }
        outputs = [] if returned is None else self._finish(returned, now_s)
        waiting = list(queues.waiting.values())
        if self.case.options["policy"] == "priority":
            waiting.sort(key=lambda r: (r.priority, r.arrival_s))
        return decided | {
            "running": list(queues.running) if not is_async else None,
            "waiting": [r.request_id for r in waiting],
            "num_free_blocks": self.kv.num_free_blocks if not is_async else None,
            "outputs": outputs,
        }

    def _request(self, arrival: Any) -> Request:
        name, length = arrival.request_id, len(arrival.prompt)
        adapter = self.case.adapters[name]
        return Request(
            name,
            float(name[1:]),
            length,
            min(arrival.max_tokens, self.case.workload.max_model_len - length),
            priority=self.case.priorities[name],
            lora_id=f"adapter{adapter}" if adapter else None,
        )

    def _finish(self, batch: ScheduledBatch, now_s: float) -> list[Any]:
        emitting = [c.request for c in batch.chunks if c.emits_token]
        emitting = [r for r in emitting if r.end_reason is None]
        tokens = {r.request_id: self._token(r) for r in emitting}
        stopped = frozenset(name for name, token in tokens.items() if token == STOP_TOKEN)
        self.scheduler.update(batch, StepResult(tokens, stopped), now_s)
        ended = {r.request_id for r in self.scheduler.take_ended()}
        return sorted((name, token, name in ended) for name, token in tokens.items())

    def _token(self, request: Request) -> int:
        """Return the token that `Loop` gives at this position."""
        place = request.num_output_tokens - request.num_output_placeholders
        workload = self.case.workload
        chance = random.Random(f"{workload.seed} {request.request_id} {place}")
        if chance.random() < workload.stop_chance:
            return STOP_TOKEN
        return chance.randint(10, 49_999)


def as_ours(step: Step, *, is_async: bool) -> dict[str, Any]:
    return {
        "scheduled": step.scheduled,
        "preempted": step.preempted,
        "running": None if is_async else step.running,
        "waiting": step.waiting,
        "num_free_blocks": None if is_async else step.num_free_blocks,
        "outputs": [(name, tokens[0], end is not None) for name, tokens, end, _ in step.outputs],
    }


def compare(case: Case, *, is_async: bool, seen: Counter[str]) -> None:
    if is_under_new_rules(case, is_async=is_async):
        seen["left_out"] += 1
        return
    ours = Ours(case)
    for call, step in enumerate(run_vllm(case, is_async=is_async)):
        expected = as_ours(step, is_async=is_async)
        found = ours.call(is_async=is_async)
        assert found == expected, f"seed {case.workload.seed}, call {call}, {case}"
        seen.update(
            calls=1,
            preempted=len(step.preempted),
            with_priority=case.options["policy"] == "priority",
            tokens=len(step.outputs),
        )
    assert not ours.scheduler.num_unfinished


def test_every_step_is_decided_as_vllm_decides_it(
    record_property: Callable[[str, object], None],
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SYNC):
        compare(random_case(seed), is_async=False, seen=seen)
    record_property("seen", dict(seen))
    assert seen["calls"] > 20 * (NUM_SYNC - seen["left_out"])
    assert seen["preempted"] > 100
    assert HAS_NEW_RULES or seen["with_priority"] > seen["calls"] / 4


def test_every_step_planned_while_one_runs_is_decided_as_vllm_decides_it(
    record_property: Callable[[str, object], None],
) -> None:
    """There are blocks to spare, since vLLM otherwise takes those of a request whose last token is
    still being computed.
    """
    seen: Counter[str] = Counter()
    for seed in range(NUM_ASYNC):
        compare(random_case(seed, is_roomy=True), is_async=True, seen=seen)
    record_property("seen", dict(seen))
    assert seen["calls"] > 20 * (NUM_ASYNC - seen["left_out"])
