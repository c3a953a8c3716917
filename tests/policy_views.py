"""What a policy is shown, in a line a request: every deadline rule sees the same slack."""

from __future__ import annotations

from slosched.core import SLO, LatencyModel, Limits, Request, RequestStatus, SchedulerView
from slosched.kv import KVCache


def prompt(
    name: str, tokens: int, slack_ms: float, ttft_s: float = 1.0, tpot_s: float = 0.05
) -> Request:
    """A prompt that waits at time 0, its first token due in `slack_ms`."""
    due_s = slack_ms / 1e3
    return Request(name, due_s - ttft_s, tokens, 512, SLO(ttft_s, tpot_s), deadline_s=due_s)


def begun(name: str, tokens: int, computed: int, slack_ms: float) -> Request:
    """A prompt of which so many tokens are in the cache."""
    request = prompt(name, tokens, slack_ms)
    request.num_computed_tokens = computed
    request.status = RequestStatus.RUNNING
    return request


def decode(name: str, context: int, slack_ms: float, tpot_s: float = 0.05) -> Request:
    """A decode whose context, the token to compute included, is `context`; its second is due."""
    due_s = slack_ms / 1e3
    request = Request(name, due_s - 1.0 - tpot_s, context - 1, 512, SLO(1.0, tpot_s))
    request.token_times_s.append(due_s - tpot_s)
    request.deadline_s = due_s
    request.num_output_tokens = 1
    request.num_computed_tokens = context - 1
    request.status = RequestStatus.RUNNING
    return request


def view_of(
    *requests: Request,
    model: LatencyModel | None,
    now_s: float = 0.0,
    num_blocks: int = 100_000,
    limits: Limits | None = None,
) -> SchedulerView:
    """Of prompts and running requests, each in the order given."""
    kv = KVCache(num_blocks, block_size=16)
    for request in requests:
        if request.num_computed_tokens:
            kv.grow(request.request_id, request.num_computed_tokens)
    return SchedulerView(
        now_s=now_s,
        waiting=[r for r in requests if r.status is RequestStatus.WAITING],
        running=[r for r in requests if r.status is RequestStatus.RUNNING],
        swapped=(),
        kv=kv,
        limits=limits or Limits(max_num_batched_tokens=100_000),
        latency_model=model,
    )
