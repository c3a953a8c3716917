"""SLAI: a decode may wait until the last time at which its token can still be in time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    PlansBesideDecodes,
    Request,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.checks import check_at_least
from slosched.policy.kit.deadlines import Deadlines
from slosched.policy.kit.decode_first import add_prefills, split_running
from slosched.policy.kit.deferred import are_alone, serve_something
from slosched.policy.kit.drop import Drop, drop_late


class StartOrder(StrEnum):
    """Order in which waiting prompts start."""

    SHORTEST = "shortest"
    FCFS = "fcfs"


@dataclass
class SLAI(PlansBesideDecodes):
    """Decodes at their last schedulable time, prompts, then the other decodes, in a token budget.

    1. The last schedulable time of a decode is `offset_steps` mean steps before its next token is
       due, or `full_offset_steps` of them while a share `full_kv` of the KV blocks or more is held.
       From then on the decode is critical.
    2. Critical decodes run first, the most urgent first; then prompts that have begun, in the order
       in which they began; then waiting prompts, the shortest (less what a prefix cache holds of
       them) first and, with `tiers_first`, those with the smallest TPOT before all others; then the
       other decodes, with the tokens left.

    Source: SLAI (SIGMETRICS '26, arXiv 2508.01002); its code, agrimUT/SLAI at 5098a7a:
    `slai_scheduler.py` and `mistral7b_relaxed.yml`, whose fields are `token_budget`,
    `below_memory_limit_offset`, `above_memory_limit_offset`, `memory_limit`, `fcfs` and
    `user_priority`.  The mean is that of all steps so far.

    Differences: the offset follows the present mean and KV use, not those of the step in which the
    decode last took part.  When KV blocks run out, prompts that have begun are preempted first, the
    last one first, then the least urgent decodes; the code preempts the decode that needs the
    block.  KV blocks are kept for prompts that have begun.  The code's cap on decodes in a step,
    equal to its seats, is `max_num_seqs`.  Gaps without work are no steps.  Left out: RAD, the
    paper's throughput-optimal policy, which knows no deadline.  SLAI has no `drop`; it is here so
    that all policies can be compared with the same options.

    The policy uses no output lengths, and of step times only the mean.
    """

    token_budget: int = tunable(512, 256, 1024, 2048)
    offset_steps: float = tunable(5.0, 2.0, 10.0)
    """A decode is critical from this many mean steps before its due time on."""
    full_offset_steps: float = 10.0
    """The same while the KV cache is full; decodes then end sooner, which frees blocks."""
    full_kv: float = 0.96
    """Share of held KV blocks from which on the cache counts as full."""
    start: StartOrder = tunable(StartOrder.SHORTEST, StartOrder.FCFS)
    tiers_first: bool = True
    deadlines: Deadlines = tunable(Deadlines.TBT, Deadlines.RUN)
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_at_least(1, token_budget=self.token_budget)
        for name in ("offset_steps", "full_offset_steps", "full_kv"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        self.reset()

    def reset(self) -> None:
        self._mean_step_s = 0.0
        self._num_steps = 0
        self._last_step_s: float | None = None

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        self._observe(view, has_work=bool(view.running or view.swapped))
        batch = BatchBuilder(view, token_budget=self.token_budget)
        view = drop_late(batch, view, self.drop)
        running, begun = split_running(view.running)
        decodes, due_s = self.deadlines.in_order(running)
        offset_s = self._offset_steps(view) * self._mean_step_s
        num_critical = bisect_right([each_s - view.now_s for each_s in due_s], offset_s)
        in_order = [*decodes, *begun]
        batch.add_preempting(decodes[:num_critical], victims=list(in_order))
        self._add_prompts(batch, view, begun)
        others = [r for r in decodes[num_critical:] if not batch.has_left(r)]
        batch.add_preempting(others, victims=list(others))
        if not batch.num_scheduled_tokens:
            serve_something(batch, in_order)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan nothing else if there are only decodes: critical or not, all of them run."""
        if not are_alone(decodes, view, self.token_budget):
            return None
        self._observe(view, has_work=True)
        return SchedulerOutput()

    def _observe(self, view: SchedulerView, *, has_work: bool) -> None:
        """Update the mean step: the time since the last decision is one if work was left then."""
        if self._last_step_s is not None and has_work and not view.follows_another:
            self._num_steps += 1
            step_s = view.now_s - self._last_step_s
            self._mean_step_s += (step_s - self._mean_step_s) / self._num_steps
        self._last_step_s = view.now_s

    def _offset_steps(self, view: SchedulerView) -> float:
        num_held = view.kv.num_blocks - view.kv.num_free_blocks
        is_full = num_held >= self.full_kv * view.kv.num_blocks
        return self.full_offset_steps if is_full else self.offset_steps

    def _add_prompts(
        self, batch: BatchBuilder, view: SchedulerView, begun: Sequence[Request]
    ) -> None:
        """Add prompts; none starts or comes back in a step that had to preempt."""
        prefills = [r for r in begun if not batch.has_left(r)]
        reserved_blocks = batch.blocks_promised(prefills)
        if not (batch.preempted or batch.swapped_out) and batch.num_free_tokens > 0:
            prefills += [*view.swapped, *self._starting(view)]
        add_prefills(batch, prefills, reserved_blocks)

    def _starting(self, view: SchedulerView) -> list[Request]:
        """Return the waiting prompts in the order in which they start."""
        waiting = list(view.waiting)
        if self.start == StartOrder.SHORTEST:
            waiting.sort(key=attrgetter("num_uncomputed_tokens"))
        if self.tiers_first:
            waiting.sort(key=attrgetter("slo.tpot_s"))
        return waiting
