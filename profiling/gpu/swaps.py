"""The bandwidth of swaps between the device and host memory."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from profiling.gpu.results import Rows
from profiling.gpu.scale import Scale
from slosched.core import BlockCopy
from slosched.engine.torch import PagedKVCache, load_model

_BLOCK_SIZE = 16
_REPEATS = 7


def measure_swaps(scale: Scale, out: Path) -> None:
    """Time copies of several sizes in both directions; keep the median of the repeats."""
    rows = Rows(out / "swap.csv", ("direction", "blocks", "bytes", "seconds", "GB/s"), num_keys=2)
    loaded = load_model(
        scale.model.model,
        device=scale.model.device,
        dtype=scale.model.dtype,
        load_format="dummy" if scale.model.load_format == "dummy" else "auto",
    )
    most = max(scale.swap_blocks)
    cache = PagedKVCache(
        loaded.geometry,
        num_blocks=2 * most,
        block_size=_BLOCK_SIZE,
        num_host_blocks=most,
        device=loaded.device,
    )
    block_bytes = loaded.geometry.bytes_per_token * _BLOCK_SIZE
    for direction, swap in (("out", cache.swap_out), ("in", cache.swap_in)):
        for num_blocks in scale.swap_blocks:
            if (direction, num_blocks) in rows:
                continue
            # Every other block of the device, as the blocks of a request are scattered.
            copies = [BlockCopy(2 * i, i) for i in range(num_blocks)]
            times_s = []
            for _ in range(_REPEATS):
                _wait(loaded.device)
                start_s = time.perf_counter()
                swap(copies)
                _wait(loaded.device)
                times_s.append(time.perf_counter() - start_s)
            seconds = sorted(times_s)[_REPEATS // 2]
            num_bytes = num_blocks * block_bytes
            rows.add(direction, num_blocks, num_bytes, seconds, num_bytes / seconds / 1e9)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
