"""vLLM's own connectors (shared storage, offloading, several at once): fcfs inside vLLM against vLLM

alone."""

from __future__ import annotations

import mmap
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: run `make test-vllm`")

from lockstep import check_lockstep
from real_vllm import Workload, make_config, random_workload
from vllm.config import KVTransferConfig

NUM_WORKLOADS = 50


def repeating(seed: int, after_calls: int = 0) -> Workload:
    """Return a workload in which most prompts come back, when they may be in the storage.

    They come after `after_calls` calls and up to 40 more.
    """
    workload, rng = random_workload(seed), random.Random(seed)
    again = [
        replace(
            one,
            request_id=f"{one.request_id}-again",
            call=one.call + after_calls + rng.randint(1, 40),
        )
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


def host_memory(workload: Workload) -> dict[str, Any]:
    """Return an OffloadingConnector whose host memory holds as many blocks as the device, or two
    more requests."""
    num_blocks = workload.num_blocks * (1 if workload.seed % 2 else 3)
    return {
        "kv_connector": "OffloadConnector",
        "kv_connector_module_path": "offload_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "seed": workload.seed,
            "cpu_bytes_to_use": num_blocks * mmap.PAGESIZE,
        },
    }


def with_connector(
    kind: str, workload: Workload, folder: Path, settings: dict[str, Any] | None, **options: Any
) -> Any:
    """Return vLLM's configuration with a connector; each side has a storage of its own."""
    config = make_config(
        workload, settings=settings, disable_hybrid_kv_cache_manager=True, **options
    )
    own = folder / f"{workload.seed}{'-ours' if settings else ''}"
    transfers = {
        "storage": lambda: storage(own),
        "multi": lambda: both(own, workload.seed),
        "offloading": lambda: host_memory(workload),
    }
    config.kv_transfer_config = KVTransferConfig(**transfers[kind]())
    return config


@pytest.mark.parametrize(
    ("kind", "most_often"),
    [
        ("storage", ("num_stored", "num_loaded")),
        ("multi", ("num_stored", "num_loaded", "num_async", "num_sync")),
        ("offloading", ("num_stored", "num_loaded", "num_flushed")),
    ],
    ids=["storage", "multi", "offloading"],
)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_fcfs_decides_every_step_as_vllm_does(
    is_async: bool,
    kind: str,
    most_often: tuple[str, ...],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_WORKLOADS):
        # No two equal prompts wait at once: vLLM's offloading would let one wait for the other's load.
        workload = repeating(seed, after_calls=300 if kind == "offloading" else 0)
        options = {"is_async": is_async, "caches_prefixes": kind == "offloading" and seed % 3 > 0}
        config = partial(with_connector, kind, workload, tmp_path, **options)
        compared = check_lockstep(workload, config, is_async=is_async)
        seen.update(compared.counts)
        connector = compared.theirs.connector
        for each in getattr(connector, "sub_connectors", [connector]):
            counts = {name: value for name, value in vars(each).items() if "num_" in name}
            seen.update({name: value for name, value in counts.items() if isinstance(value, int)})
    record_property("seen", dict(seen))
    assert min(seen[each] for each in most_often) > 20, seen
