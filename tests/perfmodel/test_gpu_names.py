"""Facts about GPUs are found by whole words of their names."""

from __future__ import annotations

import pytest

from slosched.perfmodel.gpu_names import fact_of
from slosched.perfmodel.peaks import GPUS
from slosched.perfmodel.swap import HOST_LINKS


@pytest.mark.parametrize(
    ("gpu", "bytes_per_s"),
    [
        ("NVIDIA L4", 0.3e12),
        ("NVIDIA L40S", 0.864e12),
        ("NVIDIA A10", 0.6e12),
        ("NVIDIA A100-SXM4-80GB", 2.039e12),
        ("NVIDIA A100 80GB PCIe", 1.935e12),
        ("NVIDIA H100 80GB HBM3", 3.35e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 1.792e12),
    ],
)
def test_each_gpu_has_its_own_peaks(gpu: str, bytes_per_s: float) -> None:
    peaks = fact_of(gpu, GPUS)
    assert peaks is not None
    assert peaks.bytes_per_s == bytes_per_s


@pytest.mark.parametrize("gpu", ["NVIDIA L40", "NVIDIA A100-PCIE-40GB", "NVIDIA GB200", ""])
def test_a_gpu_that_is_not_known_is_not_taken_for_one_with_a_shorter_name(gpu: str) -> None:
    assert fact_of(gpu, GPUS) is None
    assert fact_of(gpu, HOST_LINKS) is None
