"""Models with several groups of layers: full attention, sliding windows, and states of one size."""

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
from real_vllm import Arrival, Layers, Loop, Workload, make_config, make_scheduler, random_workload

from slosched.integrations.vllm import SLOScheduler

NUM_WORKLOADS = 100


class GivesBackFirst:
    """A part of vLLM's scheduler that frees what windows have passed at the beginning of a step.

    vLLM alone frees it request by request, so that one may be preempted although the blocks that it
    wants are about to become free.
    """

    running: list[Any]
    kv_cache_manager: Any

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in self.running:
            num_processed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
            self.kv_cache_manager.remove_skipped_blocks(
                request.request_id, num_processed, request.num_prompt_tokens
            )
        return super().schedule(*args, **kwargs)  # type: ignore[misc]  # vLLM's scheduler


def random_layers(seed: int) -> Layers:
    rng = random.Random(f"layers {seed}")
    return Layers(
        num_full=rng.choice([1, 1, 2]),
        windows=tuple(rng.choice([3, 8, 12, 30]) for _ in range(rng.choice([0, 1, 1, 3]))),
        num_states=rng.choice([0, 0, 1, 3]),
        num_blocks_more=rng.randint(0, 3),
    )


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_fcfs_decides_every_step_as_vllm_does(
    is_async: bool, record_property: Callable[[str, object], None]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        workload, layers = random_workload(seed), random_layers(seed)
        compared = check_lockstep(
            workload,
            partial(make_config, workload, is_async=is_async),
            is_async=is_async,
            make=partial(make_scheduler, layers=layers),
            changed_by=(GivesBackFirst,) if layers.windows else (),
        )
        seen.update(compared.counts)
        seen["with_windows"] += bool(layers.windows)
        seen["with_states"] += bool(layers.num_states)
    record_property("seen", dict(seen))
    assert seen["calls"] > 20 * NUM_WORKLOADS
    assert min(seen["preemptions"], seen["with_windows"], seen["with_states"]) > 30, seen


@pytest.mark.parametrize("policy", ["fcfs", "goodput", "edf", "sarathi"])
def test_what_a_policy_plans_is_what_vllm_runs(policy: str) -> None:
    """With a prefix cache, too: what earlier requests of a step fill or evict is not foreseen."""
    num_steps = num_diverged = 0
    for seed in range(12):
        is_async, caches_prefixes = bool(seed % 2), seed % 3 > 0
        workload = random_workload(1000 + seed, shares_prefixes=caches_prefixes)
        layers = random_layers(seed)
        if caches_prefixes:  # vLLM keeps several states of a request then, and refuses these
            layers = Layers(layers.num_full, layers.windows, num_blocks_more=layers.num_blocks_more)
        settings = {
            "policy": policy,
            "profile": "rtx4090/llama-3.1-8b",
            "any_device": True,
            "slo_ttft_s": 60,
            "slo_tpot_s": 10,
        }
        config = make_config(
            workload, is_async=is_async, caches_prefixes=caches_prefixes, settings=settings
        )
        scheduler = make_scheduler(SLOScheduler, config, layers)
        pool = scheduler.kv_cache_manager.block_pool
        num_free = pool.get_num_free_blocks()
        steps = Loop(scheduler, workload, is_async, arrival_s=time.time()).run()
        ended = Counter(name for s in steps for name, _, end, _ in s.outputs if end is not None)
        assert ended == {arrival.request_id: 1 for arrival in workload.arrivals}
        assert pool.get_num_free_blocks() == num_free
        assert not scheduler.truth.fallbacks
        num_steps += scheduler.truth.num_steps
        num_diverged += scheduler.truth.num_diverged_steps
    assert num_steps > 100
    assert num_diverged <= 0.01 * num_steps


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_prompt_starts_that_fits_only_because_windows_are_short(is_async: bool) -> None:
    """It takes 50 blocks of full attention, and fewer than 17 at a time of the window's."""
    long = Arrival(0, "r0", tuple(range(1000, 1200)), max_tokens=6)
    short = Arrival(3, "r1", tuple(range(2000, 2030)), max_tokens=6)
    workload = Workload(
        seed=0,
        arrivals=(long, short),
        num_blocks=64,
        block_size=4,
        max_num_batched_tokens=8,
        max_num_seqs=4,
        max_model_len=256,
        stop_chance=0.0,
    )
    compared = check_lockstep(
        workload,
        partial(make_config, workload, is_async=is_async),
        is_async=is_async,
        make=partial(make_scheduler, layers=Layers(windows=(8,))),
        changed_by=(GivesBackFirst,),
    )
    assert compared.ours.kv_cache_manager.block_pool.num_gpu_blocks < 2 * 50
    ended = {name for s in compared.steps for name, _, end, _ in s.outputs if end is not None}
    assert ended == {"r0", "r1"}
