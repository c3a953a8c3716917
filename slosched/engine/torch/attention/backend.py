"""The protocol of attention backends, and the limits that kernels have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from slosched.core import SloschedError
from slosched.engine.torch.attention.batch import PagedBatch
from slosched.engine.torch.kv_cache import KVGeometry


class BackendUnavailableError(SloschedError):
    """The backend `name` cannot run here, because of the device, a package or its limits."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"attention {name!r} {reason}")
        self.reason = reason


class Scoring(NamedTuple):
    """The parameters with which a layer turns queries and keys into weights."""

    scale: float
    window: int | None
    """Number of the last tokens that a token sees, itself included; None for all of them."""


class AttentionPlan(Protocol):
    """The work that a backend does once per forward pass and shares between the layers."""

    def attend(self, query: Tensor, k_cache: Tensor, v_cache: Tensor, scoring: Scoring) -> Tensor:
        """Return the causal attention of every new token over its own context.

        `query` and the result are [tokens, query heads, head dim]. The caches are [blocks, block
        size, KV heads, head dim] and already hold the new tokens.
        """


@dataclass(frozen=True, slots=True)
class KernelLimits:
    """The models and block sizes for which a kernel is made; by default all."""

    block_multiple: int = 1
    """Every block size must be a multiple of this."""
    dtypes: frozenset[torch.dtype] | None = None
    max_head_dim: int | None = None
    head_dim_multiple: int = 1
    is_capturable: bool = False
    """Whether decodes are known to run right when they are replayed as a CUDA graph."""
    captures_chunks: bool = False
    """Whether a graph may also hold chunks and decodes of any lengths, and sequences of none."""

    def check(self, name: str, geometry: KVGeometry, block_size: int) -> None:
        """Raise BackendUnavailableError if kernel `name` takes not this model or block size."""
        if block_size % self.block_multiple:
            raise BackendUnavailableError(
                name,
                f"needs a block size that is a multiple of {self.block_multiple}, not "
                f"{block_size}: give --block-size {self.block_multiple}, or choose another "
                "--attention",
            )
        if self.dtypes is not None and geometry.dtype not in self.dtypes:
            allowed = " or ".join(sorted(_short(dtype) for dtype in self.dtypes))
            raise BackendUnavailableError(
                name,
                f"computes in {allowed}, not in {_short(geometry.dtype)}: give --dtype bfloat16, "
                "or choose another --attention",
            )
        too_large = self.max_head_dim is not None and geometry.head_dim > self.max_head_dim
        if too_large or geometry.head_dim % self.head_dim_multiple:
            at_most = "" if self.max_head_dim is None else f" up to {self.max_head_dim}"
            raise BackendUnavailableError(
                name,
                f"needs heads with a multiple of {self.head_dim_multiple} dimensions{at_most}, and "
                f"this model's have {geometry.head_dim}: choose another --attention",
            )


class AttentionBackend(Protocol):
    """A kernel family that implements causal attention with an optional sliding window."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> KernelLimits: ...

    def plan(self, batch: PagedBatch) -> AttentionPlan:
        """Return the work on `batch` that all layers share; it is used before the next step."""


def compute_capability(device: torch.device, name: str) -> int:
    """Return the compute capability of an NVIDIA GPU as one number, 90 for 9.0.

    Raise BackendUnavailableError for any other device.
    """
    if device.type != "cuda" or torch.version.cuda is None:
        here = "torch sees none" if not torch.cuda.is_available() else f"the device is {device}"
        raise BackendUnavailableError(name, f"needs an NVIDIA GPU, and {here}")
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
