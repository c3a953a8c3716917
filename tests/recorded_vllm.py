"""Decisions recorded from vLLM 0.33's schedulers, and the replica that has to decide the same."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slosched.core import Limits, Request
from slosched.kv import HashIndex, KVCache
from slosched.policy.engines.vllm_v0.policy import SchedulingPolicy
from slosched.scheduler import Scheduler

ORACLES = Path(__file__).parent / "oracles"
Config = dict[str, Any]


def recorded(name: str) -> list[dict[str, Any]]:
    """Return the workloads of a file, each with `config`, `arrivals` and `steps`."""
    with gzip.open(ORACLES / name, "rt") as file:
        return [json.loads(line) for line in file]


def options_of(config: Config) -> dict[str, Any]:
    """Return the options of `vllm_v1` for this configuration."""
    return {
        "policy": SchedulingPolicy(config["scheduling_policy"]),
        "long_prefill_token_threshold": config["long_prefill_token_threshold"],
        "enable_chunked_prefill": config["enable_chunked_prefill"],
        "scheduler_reserve_full_isl": config["scheduler_reserve_full_isl"],
    }


def kv_of(config: Config) -> KVCache:
    index = HashIndex() if config["enable_prefix_caching"] else None
    return KVCache(config["usable_blocks"], config["block_size"], prefix_index=index)


def limits_of(config: Config) -> Limits:
    return Limits(config["max_num_batched_tokens"], config["max_num_seqs"])


def arriving(workload: dict[str, Any], step: int) -> Iterator[Request]:
    """Yield the requests that arrive before this step, the oldest first."""
    for place, arrival in enumerate(workload["arrivals"]):
        if arrival["step"] == step:
            yield _request(arrival, place, workload["config"]["max_model_len"])


def _request(arrival: dict[str, Any], place: int, max_model_len: int) -> Request:
    length, own, shared = arrival["len"], 1000 * (place + 1), 100_000 * arrival["family"]
    return Request(
        arrival["id"],
        float(place),
        length,
        max_tokens=min(arrival["max_tokens"], max_model_len - length),
        prompt_token_ids=[
            i + (shared if i < arrival["shared_len"] else own) for i in range(length)
        ],
        priority=arrival["priority"],
    )


def waiting_names(scheduler: Scheduler, config: Config) -> list[str]:
    """Return the names of the waiting requests in the order in which vLLM lists them."""
    waiting = list(scheduler.queues.waiting.values())
    if config["scheduling_policy"] == "priority":
        waiting.sort(key=lambda r: (r.priority, r.arrival_s))
    return [r.request_id for r in waiting]
