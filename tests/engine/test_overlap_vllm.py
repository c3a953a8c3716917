"""Overlapped planning against the decisions of vLLM 0.33's asynchronous scheduler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from recorded_vllm import arriving, kv_of, limits_of, options_of, recorded, waiting_names

from slosched.core import Policy, ScheduledBatch, SchedulerOutput, SchedulerView, StepResult
from slosched.policy import FCFS
from slosched.policy.engines.vllm_v1.policy import VLLMV1
from slosched.scheduler import Scheduler

WORKLOADS = recorded("vllm033_async.jsonl.gz")


class SeesFinishing(VLLMV1):
    """vLLM lets a request keep its seat until its last token is known; slosched fills it at once."""

    scheduler: Scheduler

    @property
    def num_finishing(self) -> int:
        return len(self.scheduler.queues.finishing)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        num_seats = view.limits.max_num_seqs - self.num_finishing
        if not num_seats:
            return SchedulerOutput()
        return super().schedule(replace(view, limits=replace(view.limits, max_num_seqs=num_seats)))

    def _longest_chunk(self, view: SchedulerView, num_decodes: int) -> int | None:
        return super()._longest_chunk(view, num_decodes + self.num_finishing)


def test_every_recorded_call_is_decided_as_vllm_decides_it() -> None:
    for workload in WORKLOADS:
        difference = Replay(workload, SeesFinishing(**options_of(workload["config"]))).difference()
        assert not difference, difference
    assert (len(WORKLOADS), sum(len(w["steps"]) for w in WORKLOADS)) == (200, 5599)


def test_where_seats_are_plenty_nothing_of_vllm_has_to_be_copied() -> None:
    plenty = [
        w
        for w in WORKLOADS
        if w["config"]["max_num_seqs"] == 8
        and len(w["arrivals"]) <= 8
        and w["config"]["scheduling_policy"] == "fcfs"
        and not w["config"]["enable_prefix_caching"]
        and not w["config"]["long_prefill_token_threshold"]
    ]
    for policy in (FCFS(), VLLMV1()):
        for workload in plenty:
            difference = Replay(workload, policy).difference()
            assert not difference, difference
    assert len(plenty) >= 5


class Replay:
    """A replay in which each recorded call plans a step while that of the previous call runs."""

    def __init__(self, workload: dict[str, Any], policy: Policy) -> None:
        self.workload = workload
        self.config = workload["config"]
        self.kv = kv_of(self.config)
        self.scheduler = Scheduler(policy, self.kv, limits_of(self.config))
        if isinstance(policy, SeesFinishing):
            policy.scheduler = self.scheduler

    def difference(self) -> str:
        """Return the first difference; empty if there is none."""
        scheduler = self.scheduler
        running: ScheduledBatch | None = None
        for index, expected in enumerate(self.workload["steps"]):
            for request in arriving(self.workload, index):
                scheduler.add_request(request)
            launched = plan(scheduler, running, float(index))
            decided = {
                "launched": tokens_of(launched),
                "outputs": finish(scheduler, running, float(index)),
                "running": [r.request_id for r in scheduler.view(0.0).running],
                "waiting": waiting_names(scheduler, self.config),
            }
            recorded = {
                "launched": list((expected.get("launched") or {}).items()),
                "outputs": expected.get("outputs") or [],
                "running": expected.get("running", decided["running"]),
                "waiting": expected.get("waiting", decided["waiting"]),
            }
            if decided != recorded:
                return f"seed {self.workload['seed']}, call {index}: {decided}, not {recorded}"
            running = launched
        assert running is None
        assert self.kv.num_free_blocks == self.kv.num_blocks
        return ""


def plan(
    scheduler: Scheduler, running: ScheduledBatch | None, now_s: float
) -> ScheduledBatch | None:
    if not scheduler.num_unfinished:
        return None
    if running is not None:
        scheduler.foresee(running, now_s)
    batch = scheduler.schedule(now_s, None if running is None else now_s)
    return None if batch.is_empty else batch


def tokens_of(batch: ScheduledBatch | None) -> list[tuple[str, int]]:
    return [] if batch is None else list(batch.output.num_scheduled_tokens.items())


def finish(scheduler: Scheduler, running: ScheduledBatch | None, now_s: float) -> list[list[Any]]:
    """Finish a step; return what came out in the recordings' format: sorted by id, with the ends."""
    if running is None:
        return []
    emitted = {c.request.request_id: 7 for c in running.chunks if c.emits_token}
    scheduler.update(running, StepResult(emitted), now_s)
    ended = {r.request_id for r in scheduler.take_ended()}
    return sorted([name, 1, name in ended] for name in emitted)
