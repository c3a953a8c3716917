"""The table of attention backends, and the choice of one for a model on a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from slosched.engine.torch.attention.backend import AttentionBackend, BackendUnavailableError
from slosched.engine.torch.kv_cache import KVGeometry
from slosched.spelling import meant

AUTO = "auto"
_MODULES = {
    "vllm-flash-attn": "vllm_flash_attn",
    "flash-attn-3": "flash_attn_3",
    "flash-attn-4": "flash_attn_4",
    "torch-varlen": "torch_varlen",
    "flash-attn": "flash_attn",
    "triton": "triton",
    "cpp": "cpp",
    "sdpa": "sdpa",
}
BACKENDS = tuple(_MODULES)
"""The names of all backends; `auto` takes the first that runs, and `sdpa` runs everywhere."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The answer to whether a backend runs on a device, and if not, why."""

    name: str
    """The backend's own name, with the version of its kernels if it has several."""
    reason: str = ""
    """Why it cannot run; empty if it can."""
    install: str = ""
    """The command that installs it where it can run; empty if it runs here."""


def check_name(name: str) -> None:
    """Raise ValueError unless `name` is "auto" or that of a backend."""
    if name != AUTO and name not in BACKENDS:
        known = ", ".join((AUTO, *BACKENDS))
        raise ValueError(
            f"unknown attention backend {name!r}{meant(name, BACKENDS)}; there are {known}"
        )


def choose_backend(
    name: str, device: torch.device, geometry: KVGeometry, block_size: int
) -> AttentionBackend:
    """Return the backend `name`; for "auto" the best that runs this model with this block size.

    Raise BackendUnavailableError if the named one cannot run, ValueError for an unknown name.
    """
    check_name(name)
    if name != AUTO:
        return _fitting(name, device, geometry, block_size)
    # Triton's interpreter runs on a CPU too, but is slow.
    for candidate in BACKENDS if device.type != "cpu" else ("cpp", "sdpa"):
        try:
            return _fitting(candidate, device, geometry, block_size)
        except BackendUnavailableError:
            continue
    raise AssertionError("sdpa runs everywhere")


def statuses(device: torch.device) -> list[BackendStatus]:
    """Return for every backend, the best first, whether it runs on `device`."""
    found = []
    for name in BACKENDS:
        try:
            found.append(BackendStatus(_load(name, device).name))
        except BackendUnavailableError as error:
            found.append(BackendStatus(name, error.reason, _module(name).INSTALL))
    return found


def _fitting(
    name: str, device: torch.device, geometry: KVGeometry, block_size: int
) -> AttentionBackend:
    backend = _load(name, device)
    backend.limits.check(backend.name, geometry, block_size)
    return backend


def _load(name: str, device: torch.device) -> AttentionBackend:
    load: Callable[[torch.device], AttentionBackend] = _module(name).load
    return load(device)


def _module(name: str) -> ModuleType:
    return import_module(f"slosched.engine.torch.attention.{_MODULES[name]}")
