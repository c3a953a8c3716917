"""The attention backends that a run measures, and whether each computes attention."""

from __future__ import annotations

from pathlib import Path

import torch

from profiling.gpu.results import Rows
from profiling.gpu.scale import Scale
from slosched.engine.torch import KVGeometry
from slosched.engine.torch.attention import (
    BACKENDS,
    AttentionBackend,
    BackendUnavailableError,
    choose_backend,
)
from slosched.engine.torch.conformance import (
    LARGEST_ERROR,
    MIXES,
    WINDOWS,
    Shape,
    make_case,
    relative_error,
)

_BLOCK_SIZES = (16, 256)
"""The usual number of tokens in a KV block, and one that every backend takes."""
_GEOMETRY = KVGeometry(1, 2, 128, torch.bfloat16)


def runnable(scale: Scale) -> dict[str, int]:
    """Return the backends that run on the device, each with the block size to measure it with."""
    found = {}
    for name in scale.backends or BACKENDS:
        for block_size in reversed(_BLOCK_SIZES):
            if _backend(name, scale, block_size) is not None:
                found[name] = block_size
    return found


def check_conformance(scale: Scale, out: Path) -> None:
    """Compare every backend with float32 attention, on all shapes, windows and types."""
    rows = Rows(
        out / "conformance.csv",
        ("backend", "dtype", "shape", "window", "error", "allowed", "failure"),
        num_keys=4,
    )
    for name in runnable(scale):
        backend = _backend(name, scale, _BLOCK_SIZES[-1])
        assert backend is not None, "the largest block size suits all"
        for dtype, allowed in LARGEST_ERROR.items():
            if backend.limits.dtypes is not None and dtype not in backend.limits.dtypes:
                continue
            for mix in scale.mixes or MIXES:
                if MIXES[mix].block_size % backend.limits.block_multiple:
                    continue
                for window in WINDOWS:
                    key = (name, str(dtype).removeprefix("torch."), mix, str(window))
                    if key not in rows:
                        device = scale.model.device
                        error, failure = _error(backend, MIXES[mix], dtype, device, window)
                        rows.add(*key, error, allowed, failure)


def _error(
    backend: AttentionBackend, shape: Shape, dtype: torch.dtype, device: str, window: int | None
) -> tuple[float, str]:
    """Return the relative error, and if the kernel failed, its message."""
    try:
        return relative_error(backend, make_case(shape, dtype, device), window), ""
    except Exception as error:  # kernels of other packages raise errors of all kinds
        return float("nan"), " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _backend(name: str, scale: Scale, block_size: int) -> AttentionBackend | None:
    try:
        return choose_backend(name, torch.device(scale.model.device), _GEOMETRY, block_size)
    except BackendUnavailableError:
        return None
