"""Residual SJF: the waiting prompt with the least left to compute after its prefix cache hit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from slosched.core import PromptOrder, Request, SchedulerView, tunable
from slosched.policy.engines.vllm_v0.policy import SchedulingPolicy
from slosched.policy.engines.vllm_v1.admission import in_order
from slosched.policy.engines.vllm_v1.policy import VLLMV1


@dataclass
class VLLMResidualSJF(VLLMV1):
    """`vllm_v1`, in which waiting requests start by the KV blocks that they have to compute.

    Preempted requests come first, then those that have waited for `max_wait_s`, both in order of
    arrival.  The others follow by their residual: the tokens that the prefix cache does not hold,
    in whole blocks, so that of similar prompts the earlier one goes first.

    Source: vLLM PR #51375 (2026-08-07), `ResidualSJFRequestQueue`: `residual_sjf_max_wait_ms` →
    `max_wait_s`.  Its author compared with an order by whole prompts, which is not part of the
    change and is `cache_aware=false` here.  Differences:

    * The PR looks at the cache before each request that starts.  Here the order is that of the
      begin of the step.
    * Of equals, the first in the queue starts first; in the PR, the one with the first name does.
    """

    policy: SchedulingPolicy = field(default=SchedulingPolicy.FCFS, init=False, repr=False)
    max_wait_s: float = tunable(10.0, 1.0, 3.0, 30.0)
    """Seconds after which a waiting request goes before all that have waited less."""
    cache_aware: bool = True
    """False if cached tokens of a prompt count like all others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.max_wait_s > 0:
            raise ValueError(f"max_wait_s must be a positive number, not {self.max_wait_s}")

    @property
    def prompt_order(self) -> PromptOrder:
        return PromptOrder.LENGTH

    def waiting_in_order(self, view: SchedulerView) -> Iterable[Request]:
        block_size, aged_s = view.kv.block_size, view.now_s - self.max_wait_s
        cache_aware = self.cache_aware

        def place(request: Request) -> tuple[int, int, float]:
            arrival_s = request.arrival_s
            if request.num_preemptions:
                return 0, 0, arrival_s
            if arrival_s <= aged_s:
                return 1, 0, arrival_s
            left = request.num_uncomputed_tokens if cache_aware else request.num_tokens
            return 2, -(-left // block_size), arrival_s

        return in_order(view.waiting, place)
