"""What a policy is shown, made up in a line a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slosched.core import SLO, LatencyModel, Limits, Request, RequestStatus, SchedulerView
from slosched.kv import KVCache
from slosched.perfmodel import LinearCoefficients, LinearModel


@dataclass(frozen=True)
class R:
    """One request: a prompt that waits or has begun, or a decode whose next token is due."""

    name: str
    tokens: int
    """Known ones: of the prompt, and for a decode of its output, too."""
    due_s: float
    """When its next token is due."""
    tpot_s: float = 0.05
    out: int = 0
    """Tokens that it has emitted; with any it is a running decode."""
    done: int = 0
    """Prompt tokens computed; with any it is a running prompt."""
    arrival_s: float = 0.0
    priority: int = 0
    lora_id: str | None = None
    max_tokens: int = 100_000


def flat_model(constant_s: float = 5e-3, per_token_s: float = 50e-6) -> LinearModel:
    """T = constant + tokens · per token: times that can be summed by hand."""
    return LinearModel(LinearCoefficients(per_token_s, 0, 0, 0, 0, 0, constant_s))


def view_of(
    requests: Sequence[R],
    model: LatencyModel | None = None,
    *,
    now_s: float = 0.0,
    limits: Limits | None = None,
    num_blocks: int = 1_000_000,
) -> SchedulerView:
    """The view at `now_s`, with KV blocks of one token; promises begin at `R.arrival_s`."""
    kv = KVCache(num_blocks, block_size=1)
    waiting, running = [], []
    for r in requests:
        request = Request(
            r.name,
            r.arrival_s,
            num_prompt_tokens=r.tokens - r.out,
            max_tokens=r.max_tokens,
            slo=SLO(max(r.due_s - r.arrival_s, 1e-9), r.tpot_s),
            priority=r.priority,
            lora_id=r.lora_id,
            deadline_s=r.due_s,
        )
        request.num_output_tokens = r.out
        request.num_computed_tokens = r.tokens - 1 if r.out else r.done
        if request.num_computed_tokens:
            kv.grow(r.name, request.num_computed_tokens)
            request.status = RequestStatus.RUNNING
        (running if request.status is RequestStatus.RUNNING else waiting).append(request)
    return SchedulerView(
        now_s=now_s,
        waiting=waiting,
        running=running,
        swapped=(),
        kv=kv,
        limits=limits or Limits(max_num_batched_tokens=100_000, max_num_seqs=100_000),
        latency_model=model or flat_model(),
    )
