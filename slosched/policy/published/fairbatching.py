"""FairBatching: decodes that are ahead of their deadlines leave room in the step to prompts."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    PlansBesideDecodes,
    Request,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_share
from slosched.policy.kit.deadlines import Deadlines
from slosched.policy.kit.decode_first import add_prefills, split_running
from slosched.policy.kit.deferred import (
    add_without_preempting,
    all_in_time,
    are_alone,
    num_in_time,
    serve_something,
)
from slosched.policy.kit.drop import Drop, drop_late


@dataclass
class FairBatching(PlansBesideDecodes):
    """Urgent decodes, then prompts, then the other decodes, in the time of the step.

    1. The time limit of the step is max(smallest slack, smallest TPOT) over the decodes: the step
       may last until the first decode is due, and always one TPOT.
    2. A decode is urgent if its slack is at most this limit plus the smallest TPOT: if it were
       left out now, the next step could be too late for it.
    3. The step takes urgent decodes, then prompts (begun and waiting), then the other decodes, each
       group by slack, as long as it is predicted to end within the limit.  Prompts are cut to fit.

    Source: FairBatching (arXiv 2510.14392), whose code is not public: batch capacity, envelope
    deadlines and the three groups.

    Differences: the run's latency model predicts, not the paper's a + b · new tokens + c · context.
    KV blocks are kept for prompts that have begun.  When blocks run out, decodes that are not
    urgent are preempted first, then prompts that have begun, then urgent decodes, and in each group
    the least urgent first.  If not even one request fits into the time, one is served all the same.
    Left out: PAB, the paper's signal to a router above the replicas.  The paper has no `margin` and
    no `drop`; they are here so that all policies can be compared with the same options.

    The policy uses no output lengths.
    """

    deadlines: Deadlines = tunable(Deadlines.ENVELOPE, Deadlines.RUN)
    margin: float = tunable(0.0, 0.05, 0.1, 0.2)
    """Share of the step's time that is left unused, against predictions that are too low."""
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_share(margin=self.margin)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view)
        view = drop_late(batch, view, self.drop)
        running, prompts = split_running(view.running)
        decodes, due_s = self.deadlines.in_order(running)
        begun, _ = self.deadlines.in_order(prompts)
        num_urgent = 0
        if decodes:
            step_s, urgent_until_s = self._budget(view, decodes, due_s[0])
            batch.time_limit_s = (1 - self.margin) * step_s
            num_urgent = bisect_right(due_s, urgent_until_s)
        urgent, others = decodes[:num_urgent], decodes[num_urgent:]
        in_order = [*urgent, *begun, *others]
        batch.add_preempting(urgent[: num_in_time(batch, urgent)], victims=list(in_order))
        self._add_prompts(batch, view, begun)
        others = [r for r in others if not batch.has_left(r)]
        add_without_preempting(batch, others[: num_in_time(batch, others)])
        if not batch.num_scheduled_tokens:
            serve_something(batch, in_order)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan nothing else if there are only decodes and they take less than a TPOT."""
        limit_s = (1 - self.margin) * min(decodes.num_by_tpot_s)
        if not (are_alone(decodes, view) and all_in_time(decodes, view, limit_s)):
            return None
        return SchedulerOutput()

    def _budget(
        self, view: SchedulerView, decodes: list[Request], first_due_s: float
    ) -> tuple[float, float]:
        """Return how long the step may last, and the time until which a due decode is urgent."""
        tpot_s = min(r.slo.tpot_s for r in decodes)
        step_s = max(first_due_s - view.now_s, tpot_s)
        if step_s < math.inf:
            _ = view.model  # every batch is predicted
        return step_s, view.now_s + step_s + tpot_s

    def _add_prompts(self, batch: BatchBuilder, view: SchedulerView, begun: list[Request]) -> None:
        """Add prompts by slack; none starts or comes back in a step that had to preempt."""
        prefills = [r for r in begun if not batch.has_left(r)]
        reserved_blocks = batch.blocks_promised(prefills)
        if not (batch.preempted or batch.swapped_out):
            prefills, _ = self.deadlines.in_order([*prefills, *view.swapped, *view.waiting])
        add_prefills(batch, prefills, reserved_blocks)
