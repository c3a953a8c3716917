"""Least computed first: of all running requests, preempt the one that loses least work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slosched.batch import BatchBuilder
from slosched.core import Request, SchedulerView
from slosched.policy.engines.vllm_v1.admission import add_running_choosing
from slosched.policy.engines.vllm_v1.policy import VLLMV1


@dataclass
class VLLMLeastComputedFirst(VLLMV1):
    """`vllm_v1`, in which the running request with the fewest computed tokens is preempted.

    A preempted request is computed again from its first token, so the victim's computed tokens are
    what a preemption costs.  The rule does not depend on `policy`, which orders the queue alone.

    Source: vLLM PR #53723 (2026-08-25, `preemption_victim="lcf"`, off by default there) and RFC
    #54644 (2026-08-31): `min(running, key=num_computed_tokens)`.  Their texts do not say what
    becomes of a victim that has its part in this step already.  Here it loses it, as with vLLM's
    priorities.
    """

    def add_running(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        running: Sequence[Request],
        most_tokens: int | None,
    ) -> None:
        add_running_choosing(batch, view, running, _fewest_computed, most_tokens)


def _fewest_computed(request: Request) -> int:
    return -request.num_computed_tokens
