"""The parts of a decision of `goodput`, each of which a subclass may replace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from slosched.batch import BatchBuilder
from slosched.core import DeadlineRule, DecodeGroup, LatencyModel, Request, SchedulerView, tunable
from slosched.policy.kit.arrivals import Arrivals
from slosched.policy.kit.checks import check_part, check_positive_share, check_share
from slosched.policy.kit.chunks import beside_decodes, in_chunks_like
from slosched.policy.kit.deferred import add_without_preempting
from slosched.policy.kit.drop import reject_hopeless
from slosched.policy.kit.flood import Flood
from slosched.policy.kit.giving_way import are_all_due_in_time, give_way, serve_all_decodes
from slosched.policy.kit.late_gaps import LateGaps, num_due_soon
from slosched.policy.kit.long_run import LongRun
from slosched.policy.kit.long_steps import LongSteps, long_steps
from slosched.policy.kit.memory import tokens_at_leisure, tokens_in_turn
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Order, Supply, Timed, are_in_time, best_order
from slosched.policy.kit.shortage import Shortage
from slosched.policy.kit.unkeepable import behind_others, split_unkeepable
from slosched.policy.kit.while_ahead import limit_while_ahead_s
from slosched.policy.kit.worth import Worth

_LEAST_GAIN = 1.5
"""Factor by which a step has to be longer than otherwise if decodes are late for its sake."""


@dataclass
class GoodputParts:
    """What `goodput` asks in each step; `Goodput` says when and in what order it asks.

    A subclass of `Goodput` may replace each method and each class that is named here.
    """

    margin: float = tunable(0.05, 0.02, 0.1)
    """Share of the smallest TPOT by which a step ends before the first decode is due."""
    shortest: float = tunable(0.65, 0.9)
    """Share of the smallest TPOT that a step may always last."""
    fairness: float = 0.0
    """Share of the prompts whose length does not count against them when not all can be in time.
    At 0 the longest prompt is given up, so that the most requests are good.  At 1 the prompt that
    takes longest for its length is given up, so that about the most tokens are good."""
    ageing: float = 0.0
    """How far waiting makes up for length when not all prompts can be in time.  At 0 the longest
    prompt is given up however long it has waited.  At 1 a prompt counts as nothing when it is due,
    so that those that came last are given up."""
    min_share: float = 0.1
    """Least share of the device that prompts are planned with."""

    pace_class: ClassVar[type[Pace]] = Pace
    """The class that computes how much time decodes need and how much they have."""
    worth_class: ClassVar[type[Worth]] = Worth
    """The class that chooses the smallest TPOT that is worth keeping."""
    pack_class: ClassVar[type[PromptPack]] = PromptPack
    """The class that adds prompts to a step and cuts the last of them."""
    due_steps: ClassVar[int] = 2
    """A decode that is due within so many steps of the longest time does not give way."""

    def __post_init__(self) -> None:
        check_share(margin=self.margin)
        check_positive_share(shortest=self.shortest, min_share=self.min_share)
        check_part(fairness=self.fairness, ageing=self.ageing)
        self.reset()

    def reset(self) -> None:
        self._margin = self.margin
        """The share of a TPOT that is left under the deadline rule."""
        self._arrivals = Arrivals()
        self._worth = self.worth_class(self._arrivals)
        self._flood = Flood(self._arrivals, self.min_share)
        self._late_gaps = LateGaps(self._arrivals.stays)
        self._long_run = LongRun(self._arrivals)

    def new_batch(self, view: SchedulerView, beside: DecodeGroup | None = None) -> BatchBuilder:
        """Return an empty step."""
        return BatchBuilder(view, beside=beside)

    def timed(
        self, batch: BatchBuilder, model: LatencyModel, prompts: Iterable[Request], now_s: float
    ) -> list[Timed]:
        """Reject the prompts that are not worth a try; return the others with their times."""
        return reject_hopeless(batch, model, prompts, now_s)

    def longest_s(self, pace: Pace) -> float:
        """Return how long a step may last for the sake of the decodes."""
        if pace.tpot_s == math.inf:
            return math.inf
        slack_s = pace.first_slack_s - self._margin * pace.tpot_s
        return max(slack_s, self.shortest * pace.tpot_s, pace.least_s)

    def step_s(self, pace: Pace) -> float:
        """Return the time limit of the step."""
        return min(self.longest_s(pace), pace.tpot_s)

    def supply(self, pace: Pace, batch: BatchBuilder, now_s: float, seat_s: float = 0.0) -> Supply:
        """Return the time and the seats that prompts have while every step holds all decodes."""
        share = self._share(pace.all_s / pace.tpot_s)
        return Supply(now_s + pace.all_s, share, batch.num_free_seqs, seat_s)

    def at_bare_pace(self, pace: Pace, supply: Supply) -> Supply:
        """Return what prompts have while decodes run only as often as their TPOTs ask for."""
        return supply._replace(share=self._share(pace.all_s * pace.steps_per_s))

    def long_steps(self, pace: Pace, view: SchedulerView) -> LongSteps | None:
        """Return the steps longer than a TPOT that let prompts go faster; None if none do.

        The rule `tbt`, which counts every gap between tokens, forgives no long step.
        """
        if view.limits.deadline_rule is DeadlineRule.TBT:
            return None
        return long_steps(pace, view.model, view.limits.max_num_batched_tokens, self.min_share)

    def is_enough_for_all(self, pace: Pace, prompts: Sequence[Timed], supply: Supply) -> bool:
        """Tell whether steps have time for all decodes and leave enough for all prompts."""
        if not prompts:
            return pace.all_s < self.longest_s(pace)
        return pace.all_s < self.step_s(pace) and are_in_time(prompts, supply)

    def order(self, shortage: Shortage) -> Order:
        """Return which prompts are in time, which are late, and in what order they run."""
        view, pace, kept = shortage.view, shortage.pace, self._worth.least
        prompts, hopeless = split_unkeepable(shortage.prompts, view, kept)
        order = best_order(prompts, shortage.supply, self.fairness, self.ageing)
        if not (self.fairness or self.ageing or self._flood.may_long_start(pace, view)):
            order = self._long_run.long_last(order, pace, view, kept)
        return behind_others(order, hopeless)

    def spread(
        self,
        pace: Pace,
        prompts: Sequence[Timed],
        supply: Supply,
        batch: BatchBuilder,
        view: SchedulerView,
    ) -> None:
        """Limit the tokens of prompts that have time, so that decodes free their blocks sooner."""
        tokens = tokens_at_leisure(pace, prompts, supply, view.now_s, view) if prompts else None
        if tokens is not None and tokens < batch.num_free_tokens:
            batch.num_free_tokens, batch.is_at_leisure = tokens, True

    def take_freed(self, shortage: Shortage, pack: PromptPack) -> bool:
        """Add all decodes, and prompts as far as decodes free KV blocks, if there are few.

        Returns False, and adds nothing, if blocks are not short or time is shorter: beside decodes
        the step then has none for as many prompt tokens as they free.
        """
        view, decodes, prompts, _, pace = shortage
        batch, limit_s = pack.batch, pack.batch.time_limit_s
        if pace.all_s >= limit_s or not self._flood.is_short_of_blocks(pace, prompts, pack, view):
            return False
        if not self._flood.has_time_for_freed(pace, limit_s, view):
            return False
        pack.reserved_blocks += len(decodes)  # Each will need its next block soon.
        add_without_preempting(batch, decodes)
        tokens = tokens_in_turn(pace, decodes, pack.num_free_blocks, view)
        batch.num_free_tokens = min(batch.num_free_tokens, tokens or batch.num_free_tokens)
        pack.add(self._flood.in_turn(self.order(shortage), prompts, pace, view, self.fairness))
        return True

    def give_way(self, shortage: Shortage, order: Order, pack: PromptPack) -> None:
        """Fill the step of `pack` with the decodes and prompts of `shortage`.

        Where more decodes are late or due than it has time for, it holds all of them instead: if a
        few were served at a time, each few would pay the constant of a step, and ever more be late.
        Only a mean TPOT forgives that.  No decode gives way either while more prompts want a seat
        than are free, and there is time for all: a decode that gives way keeps its seat for longer.
        """
        view, decodes, pace, batch = shortage.view, shortage.decodes, shortage.pace, pack.batch
        step_s, rule = batch.time_limit_s, view.limits.deadline_rule
        is_forgiven = rule is DeadlineRule.MEAN_TPOT and pace.all_s > step_s
        if is_forgiven and not are_all_due_in_time(batch, decodes, view):
            batch.time_limit_s = math.nextafter(pace.all_s, math.inf)
            add_without_preempting(batch, decodes)
            return
        if pace.all_s < step_s and shortage.lacks_seats:
            serve_all_decodes(pack, decodes, order)
            return
        if order.in_time:
            batch.time_limit_s = self.while_ahead_s(shortage, step_s)
        due_s = view.now_s + (batch.time_limit_s + (self.due_steps - 1) * step_s)
        give_way(pack, decodes, order, view, due_s)

    def while_ahead_s(self, shortage: Shortage, step_s: float) -> float:
        """Return the time limit of a step in which decodes give way, at least `step_s`."""
        view, decodes, pace = shortage.view, shortage.decodes, shortage.pace
        return limit_while_ahead_s(pace, decodes, view, self._margin, step_s)

    def beside_decodes(
        self, pace: Pace, prompts: Sequence[Timed], view: SchedulerView
    ) -> Sequence[Timed]:
        """Return the prompts with the time that they add to steps that last a TPOT."""
        share = self._share(pace.all_s * pace.steps_per_s)
        budget_tokens = view.limits.max_num_batched_tokens
        return beside_decodes(prompts, pace, view.model, budget_tokens, share)

    def take_turns(self, long: LongSteps, shortage: Shortage, pack: PromptPack) -> None:
        """Add all decodes, and the chunk of a long step as soon as they are ahead by as much."""
        view, decodes, prompts, supply, pace = shortage
        is_short = self._flood.is_short_of_blocks(pace, prompts, pack, view)
        limit_s = long.limit_s(decodes, prompts, pace, view, self._margin)
        if limit_s is None:
            between = long.between(decodes, prompts, pace, view, self._margin)
            add_without_preempting(pack.batch, decodes if is_short else between)
            return
        add_without_preempting(pack.batch, decodes)
        pack.batch.time_limit_s = limit_s
        budget_tokens = view.limits.max_num_batched_tokens
        timed = in_chunks_like(long.chunk, prompts, view.model, budget_tokens)
        supply = supply._replace(share=self._share(long.between_s / long.tpot_s))
        order = self.order(Shortage(view, decodes, timed, supply, pace))
        in_turn = [*order.in_time, *order.late]
        if is_short:
            in_turn = self._flood.in_turn(order, timed, pace, view, self.fairness)
        pack.add(in_turn)

    def spend_late_gap(self, tpot_s: float, shortage: Shortage, pack: PromptPack) -> bool:
        """Add all decodes, and once prompts are due whole ones, which makes decodes late.

        Fewer decodes may miss their SLO by it than prompts would.  `tpot_s` leaves no time for
        prompts.  Returns False, and adds nothing, if a larger TPOT leaves them time and not all
        decodes can afford a late gap.
        """
        view, decodes, prompts, supply, pace = shortage
        batch = pack.batch
        limits_s = self._late_gaps.limits_s(decodes, tpot_s, view, self._margin)
        if pace.tpot_s > tpot_s and limits_s[0] <= _LEAST_GAIN * batch.time_limit_s:
            return False
        batch.time_limit_s = max(tpot_s, math.nextafter(pace.all_s, math.inf))
        add_without_preempting(batch, decodes)
        budget_tokens = view.limits.max_num_batched_tokens
        num_due = num_due_soon(prompts, pace, batch.time_limit_s, view.now_s, budget_tokens)
        if not num_due:
            pack.add(r for r, _ in prompts)
            return True
        limit_s = limits_s[min(num_due, len(limits_s)) - 1]
        batch.time_limit_s = max(batch.time_limit_s, limit_s)
        order = self.order(shortage._replace(supply=supply._replace(share=1.0)))
        pack.add([*order.in_time, *order.late])
        return True

    def _share(self, of_decodes: float) -> float:
        """Return the share of the device that prompts are planned with."""
        return max(self.min_share, 1 - of_decodes)
