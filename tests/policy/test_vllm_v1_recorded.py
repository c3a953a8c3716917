"""vllm_v1, and fcfs, against decisions recorded from the real vLLM 0.33 scheduler, step by step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from recorded_vllm import arriving, kv_of, limits_of, options_of, recorded, waiting_names

from slosched.core import Policy, ScheduledBatch, StepResult
from slosched.policy import FCFS
from slosched.policy.vllm_v1 import VLLMV1
from slosched.scheduler import Scheduler

WORKLOADS = recorded("vllm033.jsonl.gz")
CACHING = [w for w in WORKLOADS if w["config"]["enable_prefix_caching"]]
WITHOUT = [w for w in WORKLOADS if not w["config"]["enable_prefix_caching"]]


def test_every_recorded_step_is_decided_as_vllm_decides_it() -> None:
    seen: Counter[str] = Counter()
    for workload in WITHOUT:
        replay = Replay(workload, VLLMV1(**options_of(workload["config"])))
        assert not replay.first_difference(), replay.where
        seen += replay.seen
    assert (len(WITHOUT), seen["steps"], seen["preempted"]) == (185, 4770, 178)


def test_fcfs_is_vllm_v1_with_its_defaults() -> None:
    defaults = options_of(WITHOUT[0]["config"]) | {"long_prefill_token_threshold": 0}
    workloads = [w for w in WITHOUT if options_of(w["config"]) == defaults]
    seen: Counter[str] = Counter()
    for workload in workloads:
        replay = Replay(workload, FCFS())
        assert not replay.first_difference(), replay.where
        seen += replay.seen
    assert (len(workloads), seen["steps"]) == (57, 1464)
    assert seen["preempted"] == 26


def test_where_prefixes_are_shared_only_the_kv_cache_differs() -> None:
    """slosched's has a block for others once it is computed, and each content once.

    In vLLM requests of the same step share already, and two that computed the same keep both.
    """
    differences: Counter[str] = Counter()
    for workload in CACHING:
        replay = Replay(workload, VLLMV1(**options_of(workload["config"])))
        if not replay.first_difference():
            differences["none"] += 1
        elif replay.found_less:
            differences["shares in the same step"] += 1
        else:
            assert replay.merged or replay.differs_in == ["free"], replay.where
            differences["keeps the same twice"] += 1
    assert differences["none"] >= 66
    assert differences.total() == 115


class Replay:
    """One recorded workload, played with the policy until it differs."""

    def __init__(self, workload: dict[str, Any], policy: Policy) -> None:
        self.workload = workload
        self.config = workload["config"]
        self.kv = kv_of(self.config)
        self.scheduler = Scheduler(policy, self.kv, limits_of(self.config))
        self.seen: Counter[str] = Counter()
        self.where = ""
        self.expected: dict[str, Any] = {}
        self.differs_in: list[str] = []
        self.found_less = False
        """Whether of a request that has started vLLM had more in its cache."""
        self.merged = False
        """Whether blocks became free because others held the same."""

    def first_difference(self) -> list[str]:
        """In what the first step that differs does so; nothing if none does."""
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
        self._look_at_cached(batch)
        num_free = self.kv.num_free_blocks
        decided = {
            "batch": list(batch.output.num_scheduled_tokens.items()),
            "preempted": sorted(batch.output.preempted),
            "running": list(scheduler.queues.running),
            "waiting": waiting_names(scheduler, self.config),
            "free": num_free,
        }
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        scheduler.update(batch, StepResult(emitted), now_s)
        decided["finished"] = sorted(r.request_id for r in scheduler.take_ended())
        self.merged |= self.kv.num_free_blocks > num_free and not decided["finished"]
        expected = self.expected | {
            "batch": list(self.expected["batch"].items()),
            "finished": sorted(self.expected["finished"]),
        }
        self.differs_in = [key for key, value in decided.items() if value != expected[key]]
        self.seen.update(steps=1, preempted=len(batch.output.preempted))

    def _look_at_cached(self, batch: ScheduledBatch) -> None:
        cached = {
            c.request.request_id: c.num_prior_tokens
            for c in batch.chunks
            if c.request.request_id in self.expected["new"]
        }
        found = self.expected["computed"]
        self.found_less |= any(cached.get(name, 0) < found[name] for name in found)
