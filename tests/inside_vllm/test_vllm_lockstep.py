"""fcfs inside vLLM against vLLM's own scheduler, call by call; every policy against its own plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Loop, make_config, make_scheduler, random_workload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

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
    num_steps = num_preemptions = num_outputs = 0
    for seed in range(NUM_WORKLOADS):
        workload = random_workload(seed, shares_prefixes=caches_prefixes)
        config = make_config(workload, is_async=is_async, caches_prefixes=caches_prefixes)
        theirs = make_scheduler(AsyncScheduler if is_async else Scheduler, config)
        config.additional_config = {"slosched": {"policy": "fcfs"}}
        ours = make_scheduler(SLOScheduler, config)
        assert isinstance(ours, AsyncScheduler) is is_async
        expected = Loop(theirs, workload, is_async).run()
        found = Loop(ours, workload, is_async).run()
        for call, (left, right) in enumerate(zip(expected, found, strict=True)):
            assert right == left, f"seed {seed}, call {call}"
        assert not ours.truth.fallbacks
        assert not ours.truth.divergences
        assert not ours.truth.num_deeper_matches
        num_steps += len(expected)
        num_preemptions += sum(len(step.preempted) for step in expected)
        num_outputs += sum(len(step.outputs) for step in expected)
    assert num_steps > 20 * NUM_WORKLOADS
    assert num_preemptions > 50
    record_property("calls", num_steps)
    record_property("preemptions", num_preemptions)
    record_property("outputs", num_outputs)


def test_fcfs_decides_as_vllm_does_in_a_pipeline() -> None:
    """Two steps with different requests are in flight at once, as in a synchronous scheduler's
    pipeline."""
    num_steps = num_preemptions = 0
    for seed in range(NUM_WORKLOADS // 2):
        workload = random_workload(seed)
        config = make_config(workload)
        config.parallel_config.pipeline_parallel_size = 2
        theirs = make_scheduler(Scheduler, config)
        config.additional_config = {"slosched": {"policy": "fcfs"}}
        ours = make_scheduler(SLOScheduler, config)
        expected, found = (Loop(each, workload, is_async=True).run() for each in (theirs, ours))
        assert found == expected, f"seed {seed}"
        assert not ours.truth.fallbacks
        assert not ours.truth.divergences
        num_steps += len(expected)
        num_preemptions += sum(len(step.preempted) for step in expected)
    assert num_steps > 20 * NUM_WORKLOADS / 2
    assert num_preemptions > 20


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
