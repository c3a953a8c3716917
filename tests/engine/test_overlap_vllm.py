"""fcfs, a step planned while one runs, against what vLLM 0.33's asynchronous scheduler decided."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slosched.core import (
    Limits,
    Request,
    ScheduledBatch,
    SchedulerOutput,
    SchedulerView,
    StepResult,
)
from slosched.kv import KVCache
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

RECORDINGS = Path(__file__).parents[1] / "oracles" / "vllm033_async.jsonl.gz"


class SeatsOfFinishing(FCFS):
    """vLLM leaves a request its seat until its last token is known; slosched fills it at once."""

    scheduler: Scheduler

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        num_seats = view.limits.max_num_seqs - len(self.scheduler.queues.finishing)
        if not num_seats:
            return SchedulerOutput()
        return super().schedule(replace(view, limits=replace(view.limits, max_num_seqs=num_seats)))


def recorded_workloads() -> list[dict[str, Any]]:
    """Those with what `fcfs` implements: no priorities, no prefix cache, no long-prefill cap."""
    with gzip.open(RECORDINGS, "rt") as file:
        workloads = [json.loads(line) for line in file]
    return [
        w
        for w in workloads
        if w["config"]["scheduling_policy"] == "fcfs"
        and not w["config"]["enable_prefix_caching"]
        and not w["config"]["long_prefill_token_threshold"]
    ]


def test_every_recorded_call_is_decided_as_vllm_decides_it() -> None:
    workloads = recorded_workloads()
    for workload in workloads:
        replay(workload)
    assert len(workloads) >= 50
    assert sum(len(workload["steps"]) for workload in workloads) >= 1000


def test_where_seats_are_plenty_nothing_of_vllm_has_to_be_copied() -> None:
    workloads = [w for w in recorded_workloads() if w["config"]["max_num_seqs"] == 8]
    plenty = [w for w in workloads if len(w["arrivals"]) <= 8]
    for workload in plenty:
        replay(workload, FCFS())
    assert len(plenty) >= 5


def replay(workload: dict[str, Any], policy: FCFS | None = None) -> None:
    """Each recorded call plans a step while the one of the call before runs."""
    config = workload["config"]
    kv = KVCache(config["usable_blocks"], config["block_size"])
    limits = Limits(config["max_num_batched_tokens"], config["max_num_seqs"])
    if policy is None:
        policy = SeatsOfFinishing()
    scheduler = Scheduler(policy, kv, limits)
    if isinstance(policy, SeatsOfFinishing):
        policy.scheduler = scheduler
    running: ScheduledBatch | None = None
    for index, expected in enumerate(workload["steps"]):
        for arrival in workload["arrivals"]:
            if arrival["step"] == index:
                scheduler.add_request(make_request(arrival, config["max_model_len"], index))
        where = f"seed {workload['seed']}, call {index}"
        launched = plan(scheduler, running, float(index))
        assert tokens_of(launched) == list((expected.get("launched") or {}).items()), where
        assert finish(scheduler, running, float(index)) == (expected.get("outputs") or []), where
        if "running" in expected:
            assert [r.request_id for r in scheduler.view(0.0).running] == expected["running"], where
            assert [r.request_id for r in scheduler.view(0.0).waiting] == expected["waiting"], where
        running = launched
    assert running is None
    assert kv.num_free_blocks == kv.num_blocks


def plan(
    scheduler: Scheduler, running: ScheduledBatch | None, now_s: float
) -> ScheduledBatch | None:
    if not scheduler.num_unfinished:
        return None
    if running is not None:
        scheduler.foresee(running, now_s, now_s)
    batch = scheduler.schedule(now_s, None if running is None else now_s)
    return None if batch.is_empty else batch


def tokens_of(batch: ScheduledBatch | None) -> list[tuple[str, int]]:
    return [] if batch is None else list(batch.output.num_scheduled_tokens.items())


def finish(scheduler: Scheduler, running: ScheduledBatch | None, now_s: float) -> list[list[Any]]:
    """What came out, as the recordings have it: sorted by id, with the ends."""
    if running is None:
        return []
    emitted = {c.request.request_id: 7 for c in running.chunks if c.emits_token}
    scheduler.update(running, StepResult(emitted), now_s)
    ended = {r.request_id for r in scheduler.take_ended()}
    return sorted([name, 1, name in ended] for name in emitted)


def make_request(arrival: dict[str, Any], max_model_len: int, step: int) -> Request:
    room = max_model_len - arrival["len"]
    return Request(
        arrival["id"], float(step), arrival["len"], max_tokens=min(arrival["max_tokens"], room)
    )
