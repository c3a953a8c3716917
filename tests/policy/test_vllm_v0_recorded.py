"""vllm_v0 against decisions recorded from the real vLLM 0.6.3 scheduler, step by step."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from slosched.core import Limits, PreemptionMode, Request, ScheduledBatch, StepResult
from slosched.kv import KVCache
from slosched.policy.vllm_v0 import VLLMV0, SchedulingPolicy
from slosched.scheduler import Scheduler

RECORDINGS = Path(__file__).parents[1] / "oracles" / "vllm063.jsonl.gz"
HANGS = {226: 34, 395: 33}
"""By seed, from which step on vLLM never finishes what is left: see the policy's docstring."""


def recorded_workloads() -> list[dict[str, Any]]:
    with gzip.open(RECORDINGS, "rt") as file:
        return [json.loads(line) for line in file]


def left_out_for(workload: dict[str, Any]) -> str | None:
    """Why a recording is not replayed, if it is not."""
    config = workload["config"]
    if config["prefix"]:
        return "prefix caching"
    capacity = config["blocks"] * config["bs"]
    if any(a["len"] + a["max_tokens"] > capacity for a in workload["arrivals"]):
        return "the Scheduler refuses at the door what can never fit; vLLM drops it half done"
    return None


def test_every_recorded_step_is_decided_as_vllm_decides_it() -> None:
    left_out: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for workload in recorded_workloads():
        if reason := left_out_for(workload):
            left_out[reason] += 1
        else:
            seen += Replay(workload).run()
    assert sorted(left_out.values()) == [5, 122]
    assert (seen["workloads"], seen["steps"]) == (273, 6439)
    assert (seen["died"], seen["hung"]) == (9, len(HANGS))
    assert (seen["preempted"], seen["swapped in"], seen["forced"]) == (230, 47, 31)


class Replay:
    """One recorded workload, played with the policy."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self.workload = workload
        config = workload["config"]
        mode = PreemptionMode(config["preemption"] or "recompute")
        policy = VLLMV0(
            enable_chunked_prefill=config["chunked"],
            policy=SchedulingPolicy(config["policy"]),
            delay_factor=config["delay"],
            max_model_len=config["max_len"],
        )
        self.kv = KVCache(config["blocks"], config["bs"], config["cpu_blocks"])
        limits = Limits(config["mbt"], config["max_seqs"], preemption_mode=mode)
        self.scheduler = Scheduler(policy, self.kv, limits)
        self.waiting: list[str] = []
        """The recorded queue after the last step."""
        self.begun: dict[str, int] = {}
        """Tokens of the prompts that are not computed to their end, and hold blocks."""
        self.seen = Counter(workloads=1)

    def run(self) -> Counter[str]:
        """Compare every step; how many there were of what."""
        hangs = HANGS.get(self.workload["seed"], len(self.workload["steps"]))
        num_arrived = 0
        for index, expected in enumerate(self.workload["steps"]):
            for arrival in self.workload["arrivals"]:
                if arrival["step"] == index:
                    num_arrived += 1
                    self.scheduler.add_request(make_request(arrival, float(num_arrived)))
            self.where = f"seed {self.workload['seed']}, step {index}"
            if index >= hangs:
                self.finish_what_vllm_does_not(expected, index)
            elif "error" in expected:
                self.go_on_where_vllm_dies(index)
                break
            else:
                self.compare(expected, index)
        return self.seen

    def compare(self, expected: dict[str, Any], index: int) -> None:
        batch = self.step(index)
        output, queues = batch.output, self.scheduler.queues
        assert [(c.request.request_id, c.num_new_tokens, c.emits_token) for c in batch.chunks] == [
            (b[0], b[2], "nosample" not in b) for b in expected["batch"]
        ], self.where
        assert list(output.rejected) == expected["ignored"], self.where
        ended = [r.request_id for r in self.scheduler.take_ended()]
        assert ended == expected["ignored"] + expected["finished"], self.where
        assert sorted(queues.waiting) == sorted(expected["waiting"]), self.where
        assert sorted(queues.running) == sorted(expected["running"]), self.where
        assert list(queues.swapped) == expected["swapped"], self.where
        self.compare_order(expected)
        self.compare_blocks(batch, expected)
        num_victims = len(output.preempted) + len(output.swapped_out)
        num_forced = num_victims - expected["preempted"]
        self.seen.update(
            steps=1,
            preempted=expected["preempted"],
            forced=num_forced,
            **{"swapped in": len(output.swapped_in)},
        )

    def compare_order(self, expected: dict[str, Any]) -> None:
        """The queues as the next step will see them; with priorities the policy keeps its own."""
        policy, queues = self.scheduler.policy, self.scheduler.queues
        assert isinstance(policy, VLLMV0)
        waiting = policy._waiting if self.workload["config"]["policy"] == "priority" else None
        assert (list(queues.waiting) if waiting is None else waiting) == expected["waiting"], (
            self.where
        )
        running = [name for name in policy._running if name in queues.running]
        assert running == expected["running"], self.where

    def compare_blocks(self, batch: ScheduledBatch, expected: dict[str, Any]) -> None:
        """vLLM's free blocks are ours but for what it books in advance for prompts begun."""
        held, size = self.kv.num_held_blocks, self.kv.block_size
        for chunk in batch.chunks:
            name, is_begun = chunk.request.request_id, not chunk.emits_token
            if is_begun:
                self.begun[name] = chunk.request.num_tokens
            else:
                self.begun.pop(name, None)
        for name in [*expected["waiting"], *expected["finished"]]:
            self.begun.pop(name, None)
        in_advance = {
            name: -(-tokens // size) - (held(name) or self.kv.num_held_host_blocks(name))
            for name, tokens in self.begun.items()
        }
        running = [n for name, n in in_advance.items() if name in expected["running"]]
        assert self.kv.num_free_blocks - sum(running) == expected["free"], self.where
        out = sum(in_advance.get(name, 0) for name in batch.output.swapped_out)
        assert len(batch.swap_out) + out == expected["swap_out"], self.where

    def step(self, index: int) -> ScheduledBatch:
        batch = self.scheduler.schedule(float(index))
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        self.scheduler.update(batch, StepResult(emitted), float(index))
        return batch

    def go_on_where_vllm_dies(self, index: int) -> None:
        """For want of host memory, of which it takes more where a prompt is not computed yet."""
        output = self.step(index).output
        assert output.preempted or output.swapped_out, self.where
        self.seen["died"] += 1

    def finish_what_vllm_does_not(self, expected: dict[str, Any], index: int) -> None:
        assert not expected["finished"], self.where
        if self.scheduler.num_unfinished:
            assert not self.step(index).is_empty, self.where
            self.seen["hung"] += not self.scheduler.num_unfinished


def make_request(arrival: dict[str, Any], arrival_s: float) -> Request:
    return Request(
        arrival["id"],
        arrival_s,
        arrival["len"],
        arrival["max_tokens"],
        priority=arrival["priority"],
    )
