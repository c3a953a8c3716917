"""Views for a policy under test, with one line of code for each request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slosched.core import SLO, LatencyModel, Limits, Request, RequestStatus, SchedulerView
from slosched.kv import KVCache
from slosched.perfmodel import LinearCoefficients, LinearModel


@dataclass(frozen=True)
class R:
    """A request in a view: a waiting prompt, a running prompt or a decode."""

    name: str
    tokens: int
    """The number of known tokens: those of the prompt, and those that a decode has emitted."""
    due_s: float
    """The time at which its next token is due."""
    tpot_s: float = 0.05
    out: int = 0
    """The number of tokens that it has emitted; with any it is a running decode."""
    done: int = 0
    """The number of computed prompt tokens; with any it is a running prompt."""
    arrival_s: float = 0.0
    priority: int = 0
    lora_id: str | None = None
    max_tokens: int = 100_000

    def request(self) -> Request:
        """Return the request as the scheduler keeps it, but without token times."""
        request = Request(
            self.name,
            self.arrival_s,
            num_prompt_tokens=self.tokens - self.out,
            max_tokens=self.max_tokens,
            slo=SLO(max(self.due_s - self.arrival_s, 1e-9), self.tpot_s),
            priority=self.priority,
            lora_id=self.lora_id,
            deadline_s=self.due_s,
        )
        request.num_output_tokens = self.out
        request.num_computed_tokens = self.tokens - 1 if self.out else self.done
        if request.num_computed_tokens:
            request.status = RequestStatus.RUNNING
        return request


def prompt(
    name: str, tokens: int, slack_ms: float, ttft_s: float = 1.0, tpot_s: float = 0.05
) -> Request:
    """Return a prompt that waits at time 0 and whose first token is due in `slack_ms`."""
    due_s = slack_ms / 1e3
    return Request(name, due_s - ttft_s, tokens, 512, SLO(ttft_s, tpot_s), deadline_s=due_s)


def begun(name: str, tokens: int, computed: int, slack_ms: float) -> Request:
    """Return a running prompt with `computed` tokens in the KV cache."""
    request = prompt(name, tokens, slack_ms)
    request.num_computed_tokens = computed
    request.status = RequestStatus.RUNNING
    return request


def decode(name: str, context: int, slack_ms: float, tpot_s: float = 0.05) -> Request:
    """Return a decode with `context` tokens, with the one to compute; its second token is due.

    Every deadline rule sees the same slack.
    """
    due_s = slack_ms / 1e3
    request = Request(name, due_s - 1.0 - tpot_s, context - 1, 512, SLO(1.0, tpot_s))
    request.token_times_s.append(due_s - tpot_s)
    request.deadline_s = due_s
    request.num_output_tokens = 1
    request.num_computed_tokens = context - 1
    request.status = RequestStatus.RUNNING
    return request


def flat_model(constant_s: float = 5e-3, per_token_s: float = 50e-6) -> LinearModel:
    """Return the model T = constant + tokens · per token, whose times can be summed by hand."""
    return LinearModel(LinearCoefficients(per_token_s, 0, 0, 0, 0, 0, constant_s))


FLAT = flat_model()


def view_of(
    requests: Sequence[R | Request],
    model: LatencyModel | None = FLAT,
    *,
    now_s: float = 0.0,
    limits: Limits | None = None,
    num_blocks: int = 1_000_000,
    block_size: int = 1,
) -> SchedulerView:
    """Return the view at `now_s` of waiting and running requests, each in the given order."""
    kv = KVCache(num_blocks, block_size)
    made = [r.request() if isinstance(r, R) else r for r in requests]
    for request in made:
        if request.num_computed_tokens:
            kv.grow(request.request_id, request.num_computed_tokens)
    return SchedulerView(
        now_s=now_s,
        waiting=[r for r in made if r.status is RequestStatus.WAITING],
        running=[r for r in made if r.status is RequestStatus.RUNNING],
        swapped=(),
        kv=kv,
        limits=limits or Limits(max_num_batched_tokens=100_000, max_num_seqs=100_000),
        latency_model=model,
    )
