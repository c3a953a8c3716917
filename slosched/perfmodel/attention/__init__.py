"""What attention adds to a step, by the kind of kernels that the backend launches.

*Separate* kernels, one for the prefill chunks and one for the decodes, take the sum of their
times.  A *joint* kernel takes all requests in one launch; as soon as one of them brings more than
one query row, decodes lose what makes them fast alone, and the launch takes what the busiest
processor takes, not the sum.

Each formula stands there twice: for one shape, which a scheduler asks a thousand times a second
(`asked`), and `column_seconds` for many at once, which a fit asks.  A test holds them together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from slosched.core import BatchShape
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
        """What answers for one shape, which has at least one request; fast."""

    def column_seconds(self, c: Columns) -> Array:
        """For each of many shapes."""


__all__ = [
    "DECODE_PARAMETERS",
    "PREFILL_PARAMETERS",
    "Attention",
    "DecodeAttention",
    "JointAttention",
    "JointKernel",
    "PrefillAttention",
    "SeparateAttention",
    "joint_parameters",
]
