"""The rates that GPUs cannot exceed, from their data sheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Peaks:
    """Rates that a GPU cannot exceed."""

    flops_per_s: float
    """Dense bfloat16 with float32 sums: half of what data sheets give for sparse matrices."""
    bytes_per_s: float
    """The bandwidth of its memory."""


GPUS = {
    "A100-SXM4-80GB": Peaks(312e12, 2.039e12),
    "A100 80GB PCIe": Peaks(312e12, 1.935e12),
    "A10": Peaks(125e12, 0.6e12),
    "A30": Peaks(165e12, 0.933e12),
    "H100 80GB HBM3": Peaks(989.4e12, 3.35e12),
    "H100 PCIe": Peaks(756e12, 2.0e12),
    "H200": Peaks(989.4e12, 4.8e12),
    "B200": Peaks(2250e12, 8e12),
    "L40S": Peaks(362.05e12, 0.864e12),
    "L4": Peaks(121e12, 0.3e12),
    "RTX 3090": Peaks(71e12, 0.936e12),
    "RTX 4090": Peaks(165.2e12, 1.008e12),
    "RTX PRO 6000 Blackwell": Peaks(503.8e12, 1.792e12),
    "Tesla T4": Peaks(65e12, 0.32e12),
}
"""GPUs by a part of their names.

Sources: NVIDIA's data sheets of A100, A10, A30, H100, H200 SXM, HGX B200, L4, L40S and T4, and the
white papers of the Ampere GA102, Ada and RTX Blackwell PRO architectures.  Where the editions of a
card differ, the fastest is used, so that a bound may be too generous but not wrong.  The T4 has no
bfloat16; its peak is that of float16."""
