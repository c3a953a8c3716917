"""FairBatching: decodes that are ahead lend their step to prompts."""

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

    1. The step may last until the first decode is due, and at least the smallest TPOT of the
       decodes: max(min slack, min TPOT).
    2. A decode is urgent if its slack is at most that time and the smallest TPOT: were it left
       out now, the next step could be too late for it.
    3. Urgent decodes, prompts (begun and waiting), and the other decodes, each by slack: as much
       as fits is predicted to end in that time; prompts are cut to it.

    Source: FairBatching (arXiv 2510.14392), whose code is not public: batch capacity, envelope
    deadlines and the three groups as its notes have them (literature.md 2.3).

    Otherwise here: the run's latency model predicts, not its a + b · new tokens + c · context; KV
    blocks are kept for prompts begun; when they run out decodes that are not urgent are preempted
    first, then prompts begun, then urgent decodes, the least urgent first of each; if not even
    one request fits into the time, it is served all the same.  Left out: PAB, its signal to a
    router above.  `margin` and `drop`, which it has not, are there so that all are compared with
    the same options.

    Nothing is known of output lengths.
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
        """If they are alone and done in a TPOT, which the step may always last."""
        limit_s = (1 - self.margin) * min(decodes.num_by_tpot_s)
        if not (are_alone(decodes, view) and all_in_time(decodes, view, limit_s)):
            return None
        return SchedulerOutput()

    def _budget(
        self, view: SchedulerView, decodes: list[Request], first_due_s: float
    ) -> tuple[float, float]:
        """Seconds that the step may last, and the time until which decodes are urgent."""
        tpot_s = min(r.slo.tpot_s for r in decodes)
        step_s = max(first_due_s - view.now_s, tpot_s)
        if step_s < math.inf:
            _ = view.model  # every batch is predicted
        return step_s, view.now_s + step_s + tpot_s

    def _add_prompts(self, batch: BatchBuilder, view: SchedulerView, begun: list[Request]) -> None:
        """None starts or comes back in a step that had to preempt."""
        prefills = [r for r in begun if not batch.has_left(r)]
        reserved_blocks = batch.blocks_promised(prefills)
        if not (batch.preempted or batch.swapped_out):
            prefills, _ = self.deadlines.in_order([*prefills, *view.swapped, *view.waiting])
        add_prefills(batch, prefills, reserved_blocks)
