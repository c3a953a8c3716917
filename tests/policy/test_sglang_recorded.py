"""sglang against decisions recorded from the real SGLang 0.5.5 scheduler, step by step.

The real Scheduler makes, checks and carries out the plans; see `sglang_host` for the cache.  One
thing that SGLang's engine does is done here in its place.  Its overlap loop discards the token in
flight of a request that it retracts, even if it is the last, and recomputes it. slosched keeps such
a token.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from sglang_host import RadixKV, SGLangHere, Step

from slosched.batch import BatchBuilder
from slosched.core import EndReason, Limits, Request, RequestStatus, ScheduledBatch, StepResult
from slosched.kv import KVCache
from slosched.policy.engines.sglang.policy import SchedulePolicy, SGLang
from slosched.scheduler import Scheduler

ORACLES = Path(__file__).parents[1] / "oracles"
NO_LIMIT = 100_000


def recorded(name: str) -> list[dict[str, Any]]:
    with gzip.open(ORACLES / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def replayed(name: str, replay: type[Replay] | type[OverlapReplay]) -> Counter[str]:
    """Return counts of what was seen in all recordings of a file."""
    seen: Counter[str] = Counter()
    for workload in recorded(name):
        seen += replay(workload).run()
    return seen


def test_every_recorded_step_is_decided_as_sglang_decides_it() -> None:
    seen = replayed("sglang055", Replay)
    assert (seen["workloads"], seen["steps"]) == (400, 10867)


def test_every_recorded_step_where_requests_are_retracted() -> None:
    seen = replayed("sglang055_retract", Replay)
    assert (seen["workloads"], seen["steps"]) == (200, 11705)


def test_every_step_with_driving_out_adapters_and_long_prefixes() -> None:
    """`record_sglang055.py` made these recordings, for what the first ones lack."""
    seen: Counter[str] = Counter()
    for workload in recorded("sglang055_more"):
        replay = Replay(workload)
        seen += replay.run() + replay.policy.sorted
    assert (seen["workloads"], seen["steps"], seen["driven out"]) == (160, 9806, 55)
    assert (seen["like SGLang"], seen["but for ties"]) == (358, 13)


def test_every_step_with_pages_of_more_tokens() -> None:
    """`record_sglang055.py` recorded them without a prefix cache, so slosched's own is used here."""
    seen = replayed("sglang055_paged", PagedReplay)
    assert (seen["workloads"], seen["steps"]) == (35, 2924)


def test_every_step_with_pages_of_more_tokens_and_prefixes() -> None:
    """Whole pages are found, kept and evicted."""
    seen = replayed("sglang055_pages", Replay)
    assert (seen["workloads"], seen["steps"], seen["hits"]) == (60, 5643, 1408)


def test_every_step_in_the_orders_of_sglang_0_5_23() -> None:
    """Its sorting functions ran in the scheduler of 0.5.5: see `sglang0523_orders.py`."""
    seen = replayed("sglang055_newer", Replay)
    assert (seen["workloads"], seen["steps"], seen["hits"]) == (60, 6067, 1923)


def test_every_recorded_call_of_the_overlap_loop() -> None:
    seen = replayed("sglang055_overlap", OverlapReplay)
    assert (seen["workloads"], seen["steps"], seen["lost"]) == (300, 8984, 5)


def test_every_recorded_call_of_the_overlap_loop_where_requests_are_retracted() -> None:
    seen = replayed("sglang055_overlap_retract", OverlapReplay)
    assert (seen["workloads"], seen["steps"], seen["lost"]) == (150, 9334, 5)
    assert seen["dropped"] == 122


class Replay:
    """A replay of one recorded workload with the policy."""

    policy: Any

    def __init__(self, workload: dict[str, Any]) -> None:
        self.workload = workload
        self.make_host(workload["config"])
        self.where = ""
        self.seen = Counter(workloads=1)

    def make_host(self, config: dict[str, Any]) -> None:
        """Return a scheduler with SGLang's own cache."""
        self.policy = SGLangHere(**options(config))
        self.kv = RadixKV(config["kv"], config.get("page", 1))
        limits = Limits(NO_LIMIT, config["max_running"], max_loras=config.get("max_loras"))
        self.scheduler = Scheduler(self.policy, self.kv, limits)
        self.policy.kv, self.policy.finishing = self.kv, self.scheduler.queues.finishing

    def run(self) -> Counter[str]:
        """Compare every step; return counts of what was seen."""
        for index, expected in enumerate(self.workload["steps"]):
            self.where = f"seed {self.workload['seed']}, step {index}"
            for request in arrivals(self.workload, index):
                self.scheduler.add_request(request)
            if expected["mode"] is not None:
                self.compare(self.step(float(index)), expected)
            elif expected["waiting"]:
                self.idle(expected)
            self.seen["steps"] += 1  # an engine without requests does not ask
        return self.seen

    def idle(self, expected: dict[str, Any]) -> None:
        """Compare a turn of SGLang's loop without a batch."""
        view = self.scheduler.view(0.0)
        if view.waiting:
            assert not self.policy._queues.follow(view), self.where
        assert not self.policy._turn(BatchBuilder(view), view), self.where
        if expected.get("processed") is None:
            self.policy._ratio.reset()
        self.compare_state(expected)

    def step(self, now_s: float) -> ScheduledBatch:
        batch = self.scheduler.schedule(now_s)
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        self.scheduler.update(batch, StepResult(emitted), now_s + 1)
        self.settle(batch)
        return batch

    def settle(self, batch: ScheduledBatch) -> None:
        self.kv.settle(batch, self.kv.launched)

    def compare(self, batch: ScheduledBatch, expected: dict[str, Any]) -> None:
        assert [
            [c.request.request_id, c.num_new_tokens, c.num_prior_tokens] for c in batch.chunks
        ] == [[b[0], b[2], self.num_prior(b, batch)] for b in expected["batch"]], self.where
        driven_out = expected.get("driven_out", [])
        assert list(batch.output.preempted) == expected["retracted"] + driven_out, self.where
        ended = [r.request_id for r in self.scheduler.take_ended()]
        assert ended == expected["finished"], self.where
        self.seen["retracted"] += len(expected["retracted"])
        self.seen["driven out"] += len(driven_out)
        self.seen["hits"] += sum(b[1] == "extend" and b[4] > 0 for b in expected["batch"])
        self.compare_state(expected)

    def num_prior(self, entry: list[Any], batch: ScheduledBatch) -> int:
        """Return the prior tokens: as recorded for a prompt, as they must be for a decode."""
        if entry[1] == "extend":
            return int(entry[4])
        chunk = next(c for c in batch.chunks if c.request.request_id == entry[0])
        return chunk.num_prior_tokens

    def compare_state(self, expected: dict[str, Any]) -> None:
        queues = self.policy._queues
        chunked = queues.chunked
        num_empty, num_evictable = self.num_empty_and_evictable_tokens
        got = {
            "waiting": [r.request_id for r in queues.waiting],
            "running": [r.request_id for r in queues.running],
            "chunked": None if chunked is None else chunked.request_id,
            "full": self.policy._is_full,
            "ratio": round(self.policy._ratio.value, 5),
            "avail": num_empty,
            "evictable": num_evictable,
        }
        assert got == {name: expected[name] for name in got}, self.where

    @property
    def num_empty_and_evictable_tokens(self) -> tuple[int, int]:
        return self.kv.num_empty_tokens, self.kv.tree.num_evictable_tokens


class PagedReplay(Replay):
    """A replay in slosched's own KV cache, without prefixes."""

    def make_host(self, config: dict[str, Any]) -> None:
        page = config["page"]
        self.policy = SGLang(**options(config))
        self.cache = KVCache(config["kv"] // page, page)
        self.scheduler = Scheduler(self.policy, self.cache, Limits(NO_LIMIT, config["max_running"]))

    def settle(self, batch: ScheduledBatch) -> None:
        self.cache.check()

    @property
    def num_empty_and_evictable_tokens(self) -> tuple[int, int]:
        return self.cache.num_free_blocks * self.cache.block_size, 0


class OverlapReplay(Replay):
    """A replay in which each recorded call plans a step while that of the previous call runs."""

    running: tuple[ScheduledBatch, Step] | None = None

    def run(self) -> Counter[str]:
        for index, expected in enumerate(self.workload["steps"]):
            self.where = f"seed {self.workload['seed']}, call {index}"
            for request in arrivals(self.workload, index):
                self.scheduler.add_request(request)
            self.compare_call(float(index), expected)
            self.seen["steps"] += 1
        return self.seen

    def compare_call(self, now_s: float, expected: dict[str, Any]) -> None:
        before, self.running = self.running, None
        if before is not None:
            self.scheduler.foresee(before[0], now_s)
        is_idle = expected["mode"] is None and self.has_only_waiting()
        if not is_idle:
            self.launch(now_s, before is not None, expected)
        if before is not None:
            self.finish(before, now_s)
        ended = [r.request_id for r in self.scheduler.take_ended()]
        assert ended == expected["finished"], self.where
        self.idle(expected) if is_idle else self.compare_state(expected)

    def has_only_waiting(self) -> bool:
        """Tell whether SGLang still waits for slots that it wasted on requests that have ended."""
        queues = self.scheduler.queues
        return not (queues.running or queues.finishing)

    def launch(self, now_s: float, follows: bool, expected: dict[str, Any]) -> None:
        """Plan a step, which must be SGLang's except for requests that will have ended before it."""
        finishing = self.scheduler.queues.finishing
        batch = self.scheduler.schedule(now_s, now_s if follows else None)
        assert [
            [c.request.request_id, c.num_new_tokens, c.num_prior_tokens] for c in batch.chunks
        ] == [
            [b[0], b[2], self.num_prior(b, batch)]
            for b in expected["batch"]
            if b[0] not in finishing
        ], self.where
        assert self.policy.retracted == expected["retracted"], self.where
        for request in self.policy.lost:
            self.queue_again(request)
        if expected["mode"] is not None:
            self.running = batch, self.kv.launched

    def queue_again(self, request: Request) -> None:
        """Queue the request again, as SGLang does when it retracts one whose last token is coming."""
        queues = self.scheduler.queues
        queues.waiting[request.request_id] = queues.finishing.pop(request.request_id)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_output_placeholders = 0
        request.num_preemptions += 1
        drop_last_token(request)
        self.seen["lost"] += 1

    def finish(self, running: tuple[ScheduledBatch, Step], now_s: float) -> None:
        batch, step = running
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        for request in self.policy.lost:  # the scheduler skips requests that have ended
            request.end_reason = EndReason.FAULT
        self.scheduler.update(batch, StepResult(emitted), now_s + 1)
        for request in self.policy.lost:
            request.end_reason = None
        self.kv.settle(batch, step)
        lost = {request.request_id for request in self.policy.lost}
        for name in (emitted.keys() & self.scheduler.queues.waiting.keys()) - lost:
            drop_last_token(self.scheduler.queues.waiting[name])
            self.seen["dropped"] += 1


def options(config: dict[str, Any]) -> dict[str, Any]:
    """Return the policy's options."""
    return {
        "schedule_policy": SchedulePolicy(config["policy"]),
        "schedule_conservativeness": config["conserv"],
        "max_prefill_tokens": config["max_prefill"],
        "chunked_prefill_size": config["chunk"],
        "enable_mixed_chunk": config["mixed"],
        "enable_priority_scheduling": config["priority"],
        "schedule_low_priority_values_first": config.get("low_first", False),
        "priority_scheduling_preemption_threshold": config["threshold"],
    }


def drop_last_token(request: Request) -> None:
    """Drop the last token of a request, as SGLang does if it was retracted meanwhile; slosched
    keeps it."""
    request.num_output_tokens -= 1
    request.output_token_ids.pop()
    request.token_times_s.pop()


def arrivals(workload: dict[str, Any], step: int) -> list[Request]:
    """Return requests with the recordings' token ids; those of a family share their first ones."""
    return [
        Request(
            a["id"],
            float(step),
            a["len"],
            a["max_tokens"],
            prompt_token_ids=[
                100_000 * a["family"] + i if i < a["shared_len"] else 1000 * (k + 1) + i
                for i in range(a["len"])
            ],
            priority=a["priority"],
            lora_id=a.get("lora"),
        )
        for k, a in enumerate(workload["arrivals"])
        if a["step"] == step
    ]
