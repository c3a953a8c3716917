"""Cost-aware preemption: weigh what a victim frees, what it loses, and how far it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slosched.batch import BatchBuilder
from slosched.core import Request, SchedulerView
from slosched.policy.engines.vllm_v1.admission import add_running_choosing
from slosched.policy.engines.vllm_v1.policy import VLLMV1


@dataclass
class VLLMCostAware(VLLMV1):
    """`vllm_v1`, in which the running request with the largest score is preempted.

    score = blocks / max(1, tokens) · (1 - output / max(1, max_tokens)): the KV blocks that become
    free, over the tokens to compute again, times the share of the longest possible answer that is
    still to come.  The rule does not depend on `policy`, which orders the queue alone.

    Source: vLLM PR #56897 (2026-09-14): B_reclaimable → blocks that no other request holds, T_r →
    `num_tokens`, O_r → `num_output_tokens`, M_r → `max_tokens`.  Its text does not say what becomes
    of a victim that has its part in this step already.  Here it loses it, as with vLLM's
    priorities, and scores are those of the begin of the step.
    """

    def add_running(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        running: Sequence[Request],
        most_tokens: int | None,
    ) -> None:
        def score(request: Request) -> float:
            # A new ledger each time: to leave is noted in it.
            blocks = view.kv.ledger().leave(request.request_id)
            left = 1 - request.num_output_tokens / request.max_tokens
            return blocks / request.num_tokens * left

        add_running_choosing(batch, view, running, score, most_tokens)
