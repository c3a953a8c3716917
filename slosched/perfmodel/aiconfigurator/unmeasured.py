"""GPUs of which AIConfigurator has no tables; their step times are derived from other GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.perfmodel.peaks import GPUS, Peaks

_GIB = 1024**3


@dataclass(frozen=True)
class UnmeasuredGPU:
    """What a data sheet says of a GPU."""

    device: str
    """The name that CUDA gives it."""
    memory_bytes: int
    peaks: Peaks


UNMEASURED = {
    "a100pcie": UnmeasuredGPU("NVIDIA A100 80GB PCIe", 80 * _GIB, GPUS["A100 80GB PCIe"]),
    "a10": UnmeasuredGPU("NVIDIA A10", 24 * _GIB, GPUS["A10"]),
    "a30": UnmeasuredGPU("NVIDIA A30", 24 * _GIB, GPUS["A30"]),
    "h100pcie": UnmeasuredGPU("NVIDIA H100 PCIe", 80 * _GIB, GPUS["H100 PCIe"]),
    "l4": UnmeasuredGPU("NVIDIA L4", 24 * _GIB, GPUS["L4"]),
    "rtx3090": UnmeasuredGPU("NVIDIA GeForce RTX 3090", 24 * _GIB, GPUS["RTX 3090"]),
    "rtx4090": UnmeasuredGPU("NVIDIA GeForce RTX 4090", 24 * _GIB, GPUS["RTX 4090"]),
    "t4": UnmeasuredGPU("Tesla T4", 16 * _GIB, GPUS["Tesla T4"]),
}
"""The GPUs by short name.  Memory is that of the data sheet."""
