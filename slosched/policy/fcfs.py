"""First come, first served, in chunks: what vLLM V1 does by default."""

from __future__ import annotations

from dataclasses import dataclass

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    ForeseesDecodes,
    Limits,
    PlansBesideDecodes,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.engines.vllm_v1.admission import add_begun_beside, admit
from slosched.policy.kit.decode_first import decodes_until_s, may_start_new
from slosched.policy.kit.drop import Drop, drop_late


@dataclass
class FCFS(PlansBesideDecodes, ForeseesDecodes):
    """Running requests in order of admission, then waiting ones in order of arrival.

    Decodes are therefore served before new prompts.  A prompt gets the tokens of the step that are
    left, and continues in the next step.  When KV blocks run out, the youngest running request is
    preempted, and nothing new starts in that step.  A waiting request starts only if all its
    tokens fit into the free blocks.  It may overtake the head of the queue only if the head's LoRA
    adapter finds no slot.

    Source: vLLM 0.33 `v1/core/sched/scheduler.py` with its defaults; its options are in `vllm_v1`.
    Swapped requests, which V1 does not have, come back before new ones as in vLLM V0.
    """

    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view)
        view = drop_late(batch, view, self.drop)
        batch.add_preempting(view.running, victims=list(view.running))
        if may_start_new(batch, view, begun=[]):
            admit(batch, view, view.waiting)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan the rest; return None unless decodes come first and no prompt needs their blocks."""
        batch = BatchBuilder(view, beside=decodes)
        view = drop_late(batch, view, self.drop)
        if not add_begun_beside(batch, decodes, view.running):
            return None
        admit(batch, view, view.waiting)
        return batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        return decodes_until_s(decodes, limits, limits.max_num_batched_tokens)
