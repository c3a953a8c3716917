"""vllm_v1 and fcfs against decisions recorded from the real vLLM 0.33 scheduler, step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from recorded_vllm import arriving, kv_of, limits_of, options_of, recorded, waiting_names

from slosched.core import Policy, ScheduledBatch, StepResult
from slosched.policy import FCFS
from slosched.policy.engines.vllm_v1.policy import VLLMV1
from slosched.scheduler import Scheduler

WORKLOADS = recorded("vllm033.jsonl.gz")


def test_every_recorded_step_is_decided_as_vllm_decides_it() -> None:
    """The recordings are with and without prefix caching, and with both policies."""
    seen: Counter[str] = Counter()
    for workload in WORKLOADS:
        replay = Replay(workload, VLLMV1(**options_of(workload["config"])))
        assert not replay.first_difference(), replay.where
        seen += replay.seen
    assert (len(WORKLOADS), seen["steps"], seen["preempted"]) == (300, 7558, 241)
    assert seen["found cached"] == 267


def test_fcfs_is_vllm_v1_with_its_defaults() -> None:
    defaults = options_of(WORKLOADS[0]["config"]) | {"long_prefill_token_threshold": 0}
    workloads = [w for w in WORKLOADS if options_of(w["config"]) == defaults]
    seen: Counter[str] = Counter()
    for workload in workloads:
        replay = Replay(workload, FCFS())
        assert not replay.first_difference(), replay.where
        seen += replay.seen
    assert (len(workloads), seen["steps"]) == (95, 2287)
    assert seen["preempted"] == 41


class Replay:
    """A replay of one recorded workload with the policy, until it differs."""

    def __init__(self, workload: dict[str, Any], policy: Policy) -> None:
        self.workload = workload
        self.config = workload["config"]
        self.kv = kv_of(self.config)
        self.scheduler = Scheduler(policy, self.kv, limits_of(self.config))
        self.seen: Counter[str] = Counter()
        self.where = ""
        self.expected: dict[str, Any] = {}
        self.differs_in: list[str] = []

    def first_difference(self) -> list[str]:
        """Return how the first differing step differs; empty if none does."""
        for index, expected in enumerate(self.workload["steps"]):
            self.expected = expected
            self.where = f"seed {self.workload['seed']}, step {index}"
            for request in arriving(self.workload, index):
                self.scheduler.add_request(request)
            self._step(float(index))
            if self.differs_in:
                break
        return self.differs_in

    def _step(self, now_s: float) -> None:
        batch, scheduler = self.scheduler.schedule(now_s), self.scheduler
        decided = {
            "batch": list(batch.output.num_scheduled_tokens.items()),
            "preempted": sorted(batch.output.preempted),
            "running": list(scheduler.queues.running),
            "waiting": waiting_names(scheduler, self.config),
            "free": self.kv.num_free_blocks,
            "computed": self._found_cached(batch),
        }
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        scheduler.update(batch, StepResult(emitted), now_s)
        decided["finished"] = sorted(r.request_id for r in scheduler.take_ended())
        expected = self.expected | {
            "batch": list(self.expected["batch"].items()),
            "finished": sorted(self.expected["finished"]),
        }
        self.differs_in = [key for key, value in decided.items() if value != expected[key]]
        self.seen.update(steps=1, preempted=len(batch.output.preempted))

    def _found_cached(self, batch: ScheduledBatch) -> dict[str, int]:
        """Return, for the requests that start in this step, the tokens that need not be computed."""
        found = {c.request.request_id: c.num_prior_tokens for c in batch.chunks}
        new = [name for name in self.expected["new"] if found[name]]
        self.seen["found cached"] += len(new)
        return {name: found[name] for name in new}
