"""`slosched doctor`: what of this machine the torch engine can use, and how to get the rest."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from slosched.cli.console import console
from slosched.perfmodel.device import cpu_name

_EXTRAS = {"torch": "torch", "transformers": "torch", "triton": "triton", "vllm": "vllm"}
"""The libraries that matter to the engine, each with the extra of slosched that installs it."""
_NAME_WIDTH = 18
_BLOCK_SIZE = 16
"""The default of --block-size."""


def doctor() -> None:
    """List devices, libraries and attention backends: what is there, and what installs the rest.

    The backend in the last line is the one that `serve` and `profile` take with `--attention auto`,
    which is the default.

    Example: `slosched doctor`
    """
    for title, lines in (
        ("Libraries", _libraries()),
        ("Devices", _devices()),
        ("Attention backends, the best first", _backends()),
    ):
        console.print(f"[bold]{title}[/]")
        for name, what in lines:
            console.print(f"  {name:{_NAME_WIDTH}} {what}", markup=False, soft_wrap=True)


def _libraries() -> Iterator[tuple[str, str]]:
    yield "python", platform.python_version()
    for name, extra in _EXTRAS.items():
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, f"not installed: pip install 'slosched[{extra}]'"


def _devices() -> Iterator[tuple[str, str]]:
    yield "cpu", f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores"
    try:
        import torch
    except ImportError:
        yield "cuda", "unknown without torch"
        return
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU alone"
        yield "cuda", f"torch sees no GPU (this torch is built for {built})"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}",
            f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability "
            f"{gpu.major}.{gpu.minor}, CUDA {torch.version.cuda}",
        )


def _backends() -> Iterator[tuple[str, str]]:
    try:
        import torch

        from slosched.engine.torch import KVGeometry
        from slosched.engine.torch.attention import AUTO, choose_backend, statuses
    except ImportError as error:
        yield "none", f"they need the torch extra ({error}): pip install 'slosched[torch]'"
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for status in statuses(device):
        yield status.name, status.reason or "ready"
        if status.install:
            yield "", f"it comes with: {status.install}"
    usual = KVGeometry(num_layers=1, num_kv_heads=1, head_dim=128, dtype=torch.bfloat16)
    best = choose_backend(AUTO, device, usual, _BLOCK_SIZE)
    yield AUTO, f"{best.name} on {device}, for bfloat16 and blocks of {_BLOCK_SIZE} tokens"
