"""Short constructors for the models, requests and schedulers of tests."""

from __future__ import annotations

from slosched.core import SLO, LatencyModel, Limits, Policy, Request
from slosched.kv import KVCache
from slosched.perfmodel import LinearCoefficients, LinearModel
from slosched.policy import FCFS
from slosched.scheduler import Scheduler


def make_model(
    per_token_s: float = 1e-5,
    per_attention_s: float = 1e-9,
    per_context_s: float = 5e-8,
    per_tile_s: float = 1e-3,
    any_decode_s: float = 5e-4,
    per_swapped_block_s: float = 2e-5,
    constant_s: float = 6e-3,
) -> LinearModel:
    """Return the latency model of a device roughly like an H100 with an 8B model."""
    return LinearModel(
        LinearCoefficients(
            per_token_s,
            per_attention_s,
            per_context_s,
            per_tile_s,
            any_decode_s,
            per_swapped_block_s,
            constant_s,
        )
    )


def make_request(
    request_id: str = "r0",
    num_prompt_tokens: int = 8,
    max_tokens: int = 16,
    arrival_s: float = 0.0,
    ttft_s: float = 1.0,
    tpot_s: float = 0.05,
) -> Request:
    return Request(
        request_id=request_id,
        arrival_s=arrival_s,
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        slo=SLO(ttft_s, tpot_s),
    )


def make_scheduler(
    policy: Policy | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    num_host_blocks: int = 0,
    limits: Limits | None = None,
    model: LatencyModel | None = None,
) -> Scheduler:
    kv = KVCache(num_blocks, block_size, num_host_blocks)
    return Scheduler(policy or FCFS(), kv, limits, model or make_model())
