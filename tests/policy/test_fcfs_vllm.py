"""fcfs against decisions recorded from the real vLLM 0.33 scheduler, step by step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from slosched.core import Limits, Request, StepResult
from slosched.kv import KVCache
from slosched.policy import FCFS
from slosched.scheduler import Scheduler

RECORDINGS = Path(__file__).parents[1] / "oracles" / "vllm033.jsonl.gz"


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
        and w["config"]["scheduler_reserve_full_isl"]
    ]


def test_every_recorded_step_is_decided_as_vllm_decides_it() -> None:
    workloads = recorded_workloads()
    num_steps = num_preemptions = 0
    for workload in workloads:
        num_preemptions += replay(workload)
        num_steps += len(workload["steps"])
    assert len(workloads) >= 20
    assert num_steps >= 500
    assert num_preemptions > 0


def replay(workload: dict[str, Any]) -> int:
    """Play one workload; how many preemptions there were."""
    config = workload["config"]
    kv = KVCache(config["usable_blocks"], config["block_size"])
    limits = Limits(config["max_num_batched_tokens"], config["max_num_seqs"])
    scheduler = Scheduler(FCFS(), kv, limits)
    preempted = 0
    for index, expected in enumerate(workload["steps"]):
        for arrival in workload["arrivals"]:
            if arrival["step"] == index:
                scheduler.add_request(make_request(arrival, config["max_model_len"], index))
        batch = scheduler.schedule(float(index))
        where = f"seed {workload['seed']}, step {index}"
        assert dict(batch.output.num_scheduled_tokens) == expected["batch"], where
        assert list(batch.output.num_scheduled_tokens) == list(expected["batch"]), where
        assert sorted(batch.output.preempted) == expected["preempted"], where
        assert [r.request_id for r in scheduler.view(0.0).waiting] == expected["waiting"], where
        assert kv.num_free_blocks == expected["free"], where
        preempted += len(batch.output.preempted)
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        scheduler.update(batch, StepResult(emitted), float(index))
        ended = sorted(r.request_id for r in scheduler.take_ended())
        assert ended == sorted(expected["finished"]), where
    return preempted


def make_request(arrival: dict[str, Any], max_model_len: int, step: int) -> Request:
    room = max_model_len - arrival["len"]
    return Request(
        arrival["id"], float(step), arrival["len"], max_tokens=min(arrival["max_tokens"], room)
    )
