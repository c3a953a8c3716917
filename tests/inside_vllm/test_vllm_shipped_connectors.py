"""vLLM's shared-storage and multi connectors: fcfs inside vLLM against vLLM's own scheduler."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from real_vllm import Loop, Workload, make_config, make_scheduler, random_workload
from vllm.config import KVTransferConfig
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from slosched.integrations.vllm import SLOScheduler

NUM_WORKLOADS = 50


def repeating(seed: int) -> Workload:
    """Return a workload in which most prompts come back, when they may be in the storage."""
    workload, rng = random_workload(seed), random.Random(seed)
    again = [
        replace(one, request_id=f"{one.request_id}-again", call=one.call + rng.randint(1, 40))
        for one in workload.arrivals
        if rng.random() < 0.7
    ]
    arrivals = sorted((*workload.arrivals, *again), key=lambda arrival: arrival.call)
    return replace(workload, arrivals=tuple(arrivals))


def storage(folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    return {
        "kv_connector": "DiskConnector",
        "kv_connector_module_path": "disk_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def both(folder: Path, seed: int) -> dict[str, Any]:
    chance = {
        "kv_connector": "ChanceConnector",
        "kv_connector_module_path": "chance_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"seed": seed},
    }
    connectors = [storage(folder), chance]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors[:: 1 if seed % 2 else -1]},
        "kv_load_failure_policy": "recompute",
    }


@pytest.mark.parametrize("is_multi", [False, True], ids=["storage", "multi"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_fcfs_decides_every_step_as_vllm_does(
    is_async: bool, is_multi: bool, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        workload = repeating(seed)

        def scheduler(
            scheduler_class: Any, name: str, workload: Workload = workload, **options: Any
        ) -> Any:
            """Return a scheduler with a storage of its own."""
            config = make_config(
                workload, is_async=is_async, disable_hybrid_kv_cache_manager=True, **options
            )
            folder = tmp_path / name / str(workload.seed)
            transfer = both(folder, workload.seed) if is_multi else storage(folder)
            config.kv_transfer_config = KVTransferConfig(**transfer)
            return make_scheduler(scheduler_class, config)

        theirs = scheduler(AsyncScheduler if is_async else Scheduler, "theirs")
        ours = scheduler(SLOScheduler, "ours", settings={"policy": "fcfs"})
        expected = Loop(theirs, workload, is_async).run()
        found = Loop(ours, workload, is_async).run()
        for call, (left, right) in enumerate(zip(expected, found, strict=True)):
            assert right == left, f"seed {seed}, call {call}"
        assert not ours.truth.fallbacks, f"seed {seed}"
        assert not ours.truth.divergences, f"seed {seed}"
        seen.update(calls=len(expected))
        for connector in getattr(theirs.connector, "sub_connectors", [theirs.connector]):
            counts = {name: value for name, value in vars(connector).items() if "num_" in name}
            seen.update({name: value for name, value in counts.items() if isinstance(value, int)})
    record_property("seen", dict(seen))
    assert min(seen["num_stored"], seen["num_loaded"]) > 50, seen
    if is_multi:
        assert min(seen["num_async"], seen["num_sync"]) > 20, seen
