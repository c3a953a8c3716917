"""vllm_v0 against decisions recorded from the real vLLM 0.6.3 scheduler, step by step."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from slosched.core import (
    Limits,
    PreemptionMode,
    Request,
    ScheduledBatch,
    ScheduledChunk,
    StepResult,
)
from slosched.core.merged_blocks import repeated_in
from slosched.kv import KVCache, MergedIndex
from slosched.policy.engines.vllm_v0.policy import VLLMV0, SchedulingPolicy
from slosched.scheduler import Scheduler

ORACLES = Path(__file__).parents[1] / "oracles"
HANGS = {226: 34, 395: 33}
"""For each seed, the step from which vLLM never finishes what is left; see the policy's docstring.
"""


def recorded(name: str) -> list[dict[str, Any]]:
    with gzip.open(ORACLES / name, "rt") as file:
        return [json.loads(line) for line in file]


def replayed(name: str) -> Counter[str]:
    """Return counts of what was seen in all recordings of a file."""
    seen: Counter[str] = Counter()
    for workload in recorded(name):
        seen += Replay(workload).run()
    return seen


def left_out_for(workload: dict[str, Any]) -> str | None:
    """Return why a recording is not replayed; None if it is."""
    config = workload["config"]
    capacity = config["blocks"] * config["bs"]
    if any(a["len"] + a["max_tokens"] > capacity for a in workload["arrivals"]):
        return "the Scheduler refuses at the door what can never fit; vLLM drops it half done"
    return None


def test_every_recorded_step_is_decided_as_vllm_decides_it() -> None:
    left_out: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    for workload in recorded("vllm063.jsonl.gz"):
        if reason := left_out_for(workload):
            left_out[reason] += 1
        else:
            if workload["seed"] in HANGS:
                del workload["steps"][HANGS[workload["seed"]] :]
                workload["hangs"] = True
            seen += Replay(workload).run()
    assert [*left_out.values()] == [9]
    assert (seen["workloads"], seen["steps"]) == (391, 9294)
    assert (seen["died"], seen["hung"]) == (15, len(HANGS))
    assert (seen["preempted"], seen["swapped in"], seen["forced"]) == (309, 65, 48)
    assert (seen["found"], seen["found more"], seen["found less"]) == (230, 34, 0)
    assert seen["repeated"] == 17


def test_every_step_with_prefix_caching() -> None:
    """`record_vllm063.py` recorded them with longer outputs, fewer blocks and more shared prefixes."""
    seen = replayed("vllm063_prefix.jsonl.gz")
    assert (seen["workloads"], seen["steps"]) == (150, 6887)
    assert (seen["preempted"], seen["swapped in"], seen["forced"]) == (100, 40, 24)
    assert (seen["found"], seen["found more"], seen["found less"]) == (579, 66, 5)
    assert seen["repeated"] == 88


def test_every_step_with_watermark_delay_lookahead_and_adapters() -> None:
    """`record_vllm063.py` made these recordings, for what the first ones lack."""
    seen = replayed("vllm063_more.jsonl.gz")
    assert (seen["workloads"], seen["steps"]) == (120, 19355)
    assert (seen["died"], seen["hung"]) == (5, 1)
    assert (seen["preempted"], seen["swapped in"], seen["forced"]) == (209, 56, 329)


class Replay:
    """A replay of one recorded workload with the policy."""

    def __init__(self, workload: dict[str, Any]) -> None:
        self.workload = workload
        config = workload["config"]
        self.policy = VLLMV0(
            enable_chunked_prefill=config["chunked"],
            policy=SchedulingPolicy(config["policy"]),
            delay_factor=config["delay"],
            num_lookahead_slots=config.get("lookahead", 0),
            max_model_len=config["max_len"],
        )
        limits = Limits(
            config["mbt"],
            config["max_seqs"],
            max_loras=config.get("max_loras"),
            preemption_mode=PreemptionMode(config["preemption"] or "recompute"),
        )
        self.shares_prefixes = bool(config["prefix"])
        index = MergedIndex() if self.shares_prefixes else None
        self.kv = KVCache(config["blocks"], config["bs"], config["cpu_blocks"], index)
        self.scheduler = Scheduler(self.policy, self.kv, limits)
        self.where = ""
        self.seen = Counter(workloads=1)
        self.num_scheduled: Counter[str] = Counter()
        """Tokens by request as vLLM counts them, including those that it finds in the cache."""

    def run(self) -> Counter[str]:
        """Compare every step; return counts of what was seen."""
        for index, expected in enumerate(self.workload["steps"]):
            self.where = f"seed {self.workload['seed']}, step {index}"
            for place, arrival in enumerate(self.workload["arrivals"]):
                if arrival["step"] == index:
                    self.scheduler.add_request(make_request(arrival, place))
            batch = self.step(expected.get("now_s", float(index)))
            if "error" in expected:
                self.go_on_where_vllm_dies(batch)
            else:
                self.compare(batch, expected)
        if "hangs" in self.workload:
            self.finish_what_vllm_does_not()
        return self.seen

    def step(self, now_s: float) -> ScheduledBatch:
        batch = self.scheduler.schedule(now_s)
        emitted = {c.request.request_id: 7 for c in batch.chunks if c.emits_token}
        self.scheduler.update(batch, StepResult(emitted), now_s)
        return batch

    def compare(self, batch: ScheduledBatch, expected: dict[str, Any]) -> None:
        output, queues = batch.output, self.scheduler.queues
        self.compare_chunks(batch, expected)
        assert list(output.rejected) == expected["ignored"], self.where
        ended = [r.request_id for r in self.scheduler.take_ended()]
        assert sorted(ended) == sorted(expected["ignored"] + expected["finished"]), self.where
        assert sorted(queues.waiting) == sorted(expected["waiting"]), self.where
        assert sorted(queues.running) == sorted(expected["running"]), self.where
        assert list(queues.swapped) == expected["swapped"], self.where
        self.compare_order(expected)
        self.compare_blocks(output.swapped_out, expected)
        num_victims = len(output.preempted) + len(output.swapped_out)
        self.seen["steps"] += 1
        self.seen["preempted"] += expected["preempted"]
        self.seen["forced"] += num_victims - expected["preempted"]
        self.seen["swapped in"] += len(output.swapped_in)

    def compare_chunks(self, batch: ScheduledBatch, expected: dict[str, Any]) -> None:
        chunks, theirs = in_vllms_order(batch), expected["batch"]
        if self.shares_prefixes:  # a request that comes back stands first
            theirs = sorted(theirs, key=lambda chunk: chunk[0] not in batch.output.swapped_in)
        assert [(c.request.request_id, c.emits_token) for c in chunks] == [
            (b[0], "nosample" not in b) for b in theirs
        ], self.where
        for chunk, (name, _, num_tokens, *words) in zip(chunks, theirs, strict=True):
            repeats = name in repeated_in(batch.output)
            if not self.num_scheduled[name]:
                self.compare_found(chunk.num_prior_tokens + repeats, words)
            self.num_scheduled[name] += num_tokens
            self.compare_progress(chunk, self.num_scheduled[name], repeats=repeats)
            assert chunk.num_new_tokens <= num_tokens, self.where
        for name in expected["waiting"]:
            del self.num_scheduled[name]

    def compare_found(self, num_tokens: int, words: list[str]) -> None:
        """Check that a starting request finds as much as vLLM's, and what the same step computes
        for others."""
        theirs = sum(int(w.removeprefix("computed_blocks=")) for w in words if w != "nosample")
        num_more = num_tokens // self.kv.block_size - theirs
        self.seen["found"] += theirs > 0 and num_more == 0
        self.seen["found more"] += num_more > 0
        self.seen["found less"] += num_more < 0

    def compare_progress(self, chunk: ScheduledChunk, num_scheduled: int, *, repeats: bool) -> None:
        """Check that each gets as far as vLLM's; a fully cached one recomputes one token."""
        end = chunk.num_prior_tokens + chunk.num_new_tokens
        assert num_scheduled == end or (repeats and num_scheduled < end), self.where
        self.seen["repeated"] += repeats

    def compare_order(self, expected: dict[str, Any]) -> None:
        """Compare the queues as the next step will see them; with priorities the policy has its
        own."""
        queues = self.scheduler.queues
        is_kept = self.policy.policy is SchedulingPolicy.PRIORITY
        waiting = self.policy._waiting if is_kept else list(queues.waiting)
        assert waiting == expected["waiting"], self.where
        running = [name for name in self.policy._running if name in queues.running]
        assert running == expected["running"], self.where

    def compare_blocks(self, swapped_out: tuple[str, ...], expected: dict[str, Any]) -> None:
        """Compare blocks as vLLM allocates them, which is before they are needed."""
        tables, view = self.policy._tables, self.scheduler.view(0.0)
        assert self.policy._blocks(view, tables).num_free_blocks == expected["free"], self.where
        moved = sum(tables[name].num_blocks for name in swapped_out)
        assert moved == expected["swap_out"], self.where

    def go_on_where_vllm_dies(self, batch: ScheduledBatch) -> None:
        """Go on where vLLM stops because host memory, or lookahead blocks for a swap-in, are missing."""
        output = batch.output
        assert output.preempted or output.swapped_out or output.swapped_in, self.where
        self.seen["died"] += 1

    def finish_what_vllm_does_not(self) -> None:
        assert self.scheduler.num_unfinished
        while self.scheduler.num_unfinished:
            assert not self.step(1e6).is_empty, self.where
        self.seen["hung"] += 1


def in_vllms_order(batch: ScheduledBatch) -> list[ScheduledChunk]:
    """Return the chunks sorted by adapter and name, as vLLM does with adapters after deciding."""
    chunks = list(batch.chunks)
    if any(chunk.request.lora_id for chunk in chunks):
        chunks.sort(key=lambda chunk: (chunk.request.lora_id or "", chunk.request.request_id))
    return chunks


def make_request(arrival: dict[str, Any], place: int) -> Request:
    lora, length, num_shared = arrival.get("lora", 0), arrival["len"], arrival.get("shared_len", 0)
    own, shared = 1000 * (place + 1), 100_000 * arrival.get("family", 0)
    return Request(
        arrival["id"],
        arrival.get("arrival_s", float(place)),
        length,
        arrival["max_tokens"],
        prompt_token_ids=[i + (shared if i < num_shared else own) for i in range(length)],
        priority=arrival["priority"],
        lora_id=f"lora{lora}" if lora else None,
    )
