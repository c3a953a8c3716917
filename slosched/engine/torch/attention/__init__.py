"""Attention backends: kernels that attend over a paged KV cache, and the choice among them."""

from slosched.engine.torch.attention.backend import (
    AttentionBackend,
    AttentionPlan,
    BackendUnavailableError,
    KernelLimits,
    Scoring,
)
from slosched.engine.torch.attention.batch import PagedBatch
from slosched.engine.torch.attention.registry import (
    AUTO,
    BACKENDS,
    BackendStatus,
    check_name,
    choose_backend,
    statuses,
)

__all__ = [
    "AUTO",
    "BACKENDS",
    "AttentionBackend",
    "AttentionPlan",
    "BackendStatus",
    "BackendUnavailableError",
    "KernelLimits",
    "PagedBatch",
    "Scoring",
    "check_name",
    "choose_backend",
    "statuses",
]
