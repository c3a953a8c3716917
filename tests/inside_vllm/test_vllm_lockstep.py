"""fcfs inside vLLM against vLLM's own scheduler, call by call; every policy against its own plan."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from lockstep import check_lockstep
from real_vllm import Loop, Workload, make_config, make_scheduler, random_workload

from slosched.integrations.vllm import SLOScheduler
from slosched.integrations.vllm.truth import Divergence, Truth
from slosched.policy import POLICIES

NUM_WORKLOADS = 100
MAX_DIVERGED_SHARE = 0.002


@pytest.mark.parametrize("caches_prefixes", [False, True], ids=["plain", "prefix_cache"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_fcfs_decides_every_step_as_vllm_does(
    is_async: bool, caches_prefixes: bool, record_property: Callable[[str, object], None]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        workload = random_workload(seed, shares_prefixes=caches_prefixes)
        options = {"is_async": is_async, "caches_prefixes": caches_prefixes}
        config = partial(make_config, workload, **options)
        compared = check_lockstep(workload, config, is_async=is_async)
        assert not compared.ours.truth.num_deeper_matches
        seen.update(compared.counts)
    record_property("seen", dict(seen))
    assert seen["calls"] > 20 * NUM_WORKLOADS
    assert seen["preemptions"] > 50


def in_pipeline(workload: Workload, settings: dict[str, Any] | None) -> Any:
    config = make_config(workload, settings=settings)
    config.parallel_config.pipeline_parallel_size = 2
    return config


def test_fcfs_decides_as_vllm_does_in_a_pipeline() -> None:
    """Two steps with different requests are in flight at once, as in a synchronous scheduler's
    pipeline."""
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS // 2):
        workload = random_workload(seed)
        config = partial(in_pipeline, workload)
        seen.update(check_lockstep(workload, config, is_async=True).counts)
    assert seen["calls"] > 20 * NUM_WORKLOADS / 2
    assert seen["preemptions"] > 20


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_chunk_limit_and_watermark_hold_as_in_vllm(
    is_async: bool, record_property: Callable[[str, object], None]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        rng = random.Random(f"limits {seed}")
        threshold, watermark = rng.choice([0, 2, 5, 12]), rng.choice([0.0, 0.1, 0.3])
        caches_prefixes = rng.random() < 0.5
        workload = random_workload(seed, shares_prefixes=caches_prefixes)
        config = partial(
            make_config,
            workload,
            is_async=is_async,
            caches_prefixes=caches_prefixes,
            long_prefill_token_threshold=threshold,
            long_prefill_token_threshold_adaptive=rng.random() < 0.3,
            watermark=watermark,
        )
        policy = rng.choice(["fcfs", "vllm_v1"])
        compared = check_lockstep(workload, config, is_async=is_async, policy=policy)
        seen.update(compared.counts)
        seen["cut"] += sum(n == threshold for step in compared.steps for _, n in step.scheduled)
        seen["with_watermark"] += watermark > 0
    record_property("seen", dict(seen))
    assert seen["calls"] > 20 * NUM_WORKLOADS
    assert min(seen["preemptions"], seen["cut"], seen["with_watermark"]) > 50, seen


@pytest.mark.parametrize("caches_prefixes", [False, True], ids=["plain", "prefix_cache"])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_plans_is_what_vllm_runs(policy: str, caches_prefixes: bool) -> None:
    total = Truth()
    for seed in range(10):
        total_of(total, run(policy, seed, caches_prefixes=caches_prefixes).truth)
    assert not total.fallbacks
    assert total.num_steps > 100
    assert set(total.divergences) <= {Divergence.LESS}
    assert total.num_diverged_steps <= MAX_DIVERGED_SHARE * total.num_steps, total


def run(policy: str, seed: int, *, caches_prefixes: bool):  # type: ignore[no-untyped-def]
    """Run one workload to its end; each request must have been answered."""
    is_async = bool(seed % 2)
    workload = random_workload(1000 + seed, shares_prefixes=caches_prefixes)
    settings = {
        "policy": policy,
        "profile": "rtx4090/llama-3.1-8b",
        "any_device": True,
        "slo_ttft_s": 5,
        "slo_tpot_s": 1,
    }
    config = make_config(
        workload, is_async=is_async, caches_prefixes=caches_prefixes, settings=settings
    )
    scheduler = make_scheduler(SLOScheduler, config)
    steps = Loop(scheduler, workload, is_async, arrival_s=time.time()).run()
    ended = Counter(
        name for step in steps for name, _, finished, _ in step.outputs if finished is not None
    )
    assert ended == {arrival.request_id: 1 for arrival in workload.arrivals}
    assert not scheduler.requests
    return scheduler


def total_of(total: Truth, truth: Truth) -> None:
    total.num_steps += truth.num_steps
    total.num_diverged_steps += truth.num_diverged_steps
    total.divergences += truth.divergences
    total.fallbacks += truth.fallbacks
    total.rejections += truth.rejections
