"""The time that attention adds to a step, by the kind of kernels that the backend launches.

*Separate* kernels, one for the prefill chunks and one for the decodes, take the sum of their times.
A *joint* kernel computes all requests in one launch.  As soon as one request has more than one
query row, decodes lose what makes them fast alone.  The launch then takes as long as the busiest
processor, not the sum.

Each formula is written twice: `asked` is for one shape and for schedulers, which ask a thousand
times a second; `column_seconds` is for many shapes at once and for fits.  A test checks that both
agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from slosched.core import BatchShape
from slosched.perfmodel.attention.flash_decode import FlashDecodeAttention
from slosched.perfmodel.attention.joint import JointAttention, JointKernel, joint_parameters
from slosched.perfmodel.attention.separate import SeparateAttention
from slosched.perfmodel.attention.single import (
    DECODE_PARAMETERS,
    PREFILL_PARAMETERS,
    DecodeAttention,
    PrefillAttention,
)
from slosched.perfmodel.columns import Array, Columns


class Attention(Protocol):
    """Seconds of attention in all layers of one step."""

    kind: ClassVar[str]

    def asked(self) -> Callable[[BatchShape], float]:
        """Return a fast function from one shape, which has at least one request, to seconds."""

    def column_seconds(self, c: Columns) -> Array:
        """Return the seconds of each of many shapes."""


__all__ = [
    "DECODE_PARAMETERS",
    "PREFILL_PARAMETERS",
    "Attention",
    "DecodeAttention",
    "FlashDecodeAttention",
    "JointAttention",
    "JointKernel",
    "PrefillAttention",
    "SeparateAttention",
    "joint_parameters",
]
