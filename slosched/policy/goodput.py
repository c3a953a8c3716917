"""Our own policy: it serves the prompts that can still be in time, in the best order it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import ClassVar

from slosched.batch import BatchBuilder
from slosched.core import (
    DeadlineRule,
    DecodeGroup,
    DraftOffer,
    EndReason,
    ForeseesDecodes,
    LatencyModel,
    Limits,
    PlansBesideDecodes,
    PromptOrder,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    due_by,
    longest_tokens,
    tunable,
)
from slosched.policy.kit.caution import with_caution
from slosched.policy.kit.checks import check_part, check_positive_share, check_share
from slosched.policy.kit.chunks import beside_decodes, in_chunks_like
from slosched.policy.kit.decode_first import add_decodes, split_running
from slosched.policy.kit.deferred import add_without_preempting
from slosched.policy.kit.drafts import drafts_in_time
from slosched.policy.kit.drift import Drift
from slosched.policy.kit.drop import reject_hopeless, without_rejected
from slosched.policy.kit.flood import Flood
from slosched.policy.kit.giving_way import are_all_due_in_time, give_way
from slosched.policy.kit.late_gaps import LateGaps, num_due_soon, starving_tpot_s
from slosched.policy.kit.lending import lend
from slosched.policy.kit.long_steps import LongSteps, long_steps
from slosched.policy.kit.lost import may_be_lost, num_lost
from slosched.policy.kit.make_way import come_back, has_to_make_way, make_way, may_make_way
from slosched.policy.kit.memory import (
    are_few,
    lacks_blocks,
    tokens_at_leisure,
    tokens_in_turn,
    will_be_filled,
)
from slosched.policy.kit.pace import Pace, first_slack_s
from slosched.policy.kit.pausing import least_urgent_last, tokens_per_s_beside
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import (
    MAX_ASKED,
    Order,
    Supply,
    Timed,
    are_in_time,
    best_order,
    by_deadline,
    most_urgent,
    most_urgent_of_short,
)
from slosched.policy.kit.shortage import Shortage as Shortage
from slosched.policy.kit.unkeepable import behind_others, split_unkeepable, unkeepable
from slosched.policy.kit.while_ahead import limit_while_ahead_s
from slosched.policy.kit.worth import Worth

_BESIDE_CAUTION = 0.2
"""Share of `margin` that is left where a step is planned with a time that it hardly ever exceeds:
where steps scatter little, no more is needed, and where they scatter much, more was left already.
"""
_LEAST_GAIN = 1.5
"""Factor by which a step has to be longer than otherwise if decodes are late for its sake."""


@dataclass
class Goodput(PlansBesideDecodes, ForeseesDecodes):
    """The prompts that can be in time, together with decodes that give way while they have slack.

    1. Reject the requests without a token that would miss their TTFT even alone on the device, and
       new ones whose TPOT is below a step of one decode alone (kit/unkeepable.py).
    2. A step may last until the first decode is due, minus `margin`.  It is never longer than the
       smallest TPOT of the decodes (but see 4 and 5).  It may always last `shortest` of that TPOT,
       or as long as the decodes that are due and a tile of a prompt take, and no longer if a decode
       is late already.  A TPOT too small for such a step cannot be kept and counts for nothing here
       (`Pace`), nor does one that lets so few prompts through that fewer requests would be good.
       One with which most requests are good in the long run is held although there are too many
       decodes for it now (`Worth`).
    3. All decodes may fit into such a step, and the prompts that wait or have begun may all be in
       time in what the decodes leave of every step.  If KV blocks are not scarce, every decode then
       gets its token, and the prompts follow by deadline.
    4. Otherwise decodes that are not due before the end of the next step may give way.  Prompts
       are planned with the share of the device that decodes leave at the pace of their TPOTs, and
       with the seats (`max_num_seqs`) that decodes leave as they end.  Moore and Hodgson's rule
       makes the most of the prompts punctual; the others are late.  If seats are scarcer than
       time and many prompts are late, prompts go by length instead of by deadline.  The step takes
       the decodes that are due, then the punctual prompts and the other decodes by deadline, then
       the late prompts, and last those whose TPOT is not kept.  The next step plans all of them
       anew.  A prompt counts by the time that it adds to steps of decodes, not by the
       time that it takes alone.  If all decodes are ahead, and prompts go faster in full steps,
       the step lasts until shortly before the first decode is due (kit/while_ahead.py).
    5. On some devices most of the time of a chunk is spent on its first tokens.  There prompts go
       faster in steps longer than a TPOT (`LongSteps`): no prompt runs until each decode is ahead
       by a long step, and then a whole chunk runs beside all of them.  The steps between leave out
       decodes that ask for much more than the TPOT kept and are ahead.
    6. While KV blocks are scarcer than time (kit/memory.py), no decode gives way, and a step takes
       about as many prompt tokens as decodes free in it.  A decode that lacks a block gets it from
       the one that is furthest ahead (kit/pausing.py), and so do prompts that are due soon, if it
       is ahead by much more than it takes to compute it anew (kit/lending.py), and if nearly all
       ask for the same TPOT.  If more prompts arrive than decodes make room for, they go by length.
       Once half of the cache is filled, prompts that have time are spread over more steps.
    7. Best effort, and what is due much later, gives its seats and KV blocks to prompts that lack
       them (kit/make_way.py).  Best effort then waits until there is more room than it needs.
    8. A step that finishes a prompt ends before that prompt is due.  The first prompt that has to
       be cut ends with a whole tile of 64 tokens.
    9. Under the deadline rule `tbt`, which counts every gap, a step is taken to last as long as it
       hardly ever exceeds (kit/caution.py), and a fifth of `margin` is left; under the other
       rules, which forgive a slow step, it is taken to last as long as is expected.
    10. Some TPOTs can be kept only in steps of decodes alone (kit/late_gaps.py).  Prompts then wait
        until they are due.  Under the rule `tbt`, which allows for a few late gaps, they run in one
        long step, if fewer decodes miss their SLO by it than prompts would.  Under the other rules
        such TPOTs are given up if they are not worth keeping.
    11. Under the rule `envelope` a decode that is late has lost: it shortens no step (kit/lost.py).
    12. A model that is off in the mean, and does not learn it, is corrected (`Drift`).

    Giving way costs no tokens, and it lets a burst of prompts pass before decodes that are ahead
    of their TPOT.  But decodes that run at their bare pace hold seats and KV cache for longer.
    experiments/goodput has figures of this and of everything else that was tried.

    A subclass may replace each part: `new_batch`, `timed`, `pace_class`, `worth_class`,
    `longest_s`, `step_s`, `supply`, `is_enough_for_all`, `long_steps`, `take_turns`,
    `spend_late_gap`, `order`, `due_steps`, `spread`, `take_freed`, `give_way`, `while_ahead_s` and
    `pack_class`.

    Source: ours, with the rule of Moore (1968), https://doi.org/10.1287/mnsc.15.1.102.  The policy
    knows no output lengths.
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
        self._drift = Drift()
        self._worth = self.worth_class()
        self._flood = Flood(self._worth, self.min_share)
        self._late_gaps = LateGaps(self._worth.stays)
        self._unkeepable: list[Request] = []
        """New requests that the next step rejects."""

    @property
    def prompt_order(self) -> PromptOrder:
        return PromptOrder.PUNCTUAL

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        corrected = self._drift.corrected_view(view, is_busy=bool(view.running))
        self._see_new(corrected)
        output = self._planned(with_caution(corrected))
        self._unkeepable = []
        self._drift.note(view.now_s, view.model, output)
        return output

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan the prompts as `schedule` does; return None if a decode may have to give way."""
        corrected = self._drift.corrected_view(view, is_busy=True)
        if may_be_lost(decodes, view):
            return None
        self._see_new(corrected)
        output = self._planned_beside(decodes, with_caution(corrected))
        if output is not None:
            self._unkeepable = []
            self._drift.note(view.now_s, view.model, output)
        return output

    def _see_new(self, view: SchedulerView) -> None:
        """Take in the deadline rule and the requests that have arrived; note which to reject."""
        is_cautious = view.limits.deadline_rule is DeadlineRule.TBT
        self._margin = self.margin * (_BESIDE_CAUTION if is_cautious else 1.0)
        self._unkeepable += unkeepable(self._worth.see(view.waiting), view)

    def _without_unkeepable(self, batch: BatchBuilder, view: SchedulerView) -> SchedulerView:
        """Reject the new requests whose TPOT can never be kept; return the view without them."""
        for request in self._unkeepable:
            if request.status is RequestStatus.WAITING:  # Its client may have left meanwhile.
                batch.reject(request, EndReason.UNKEEPABLE)
        return without_rejected(batch, view)

    def _planned(self, view: SchedulerView) -> SchedulerOutput:
        batch, model = self.new_batch(view), view.model
        view = self._without_unkeepable(batch, view)
        decodes, begun = split_running(view.running)
        now_s = view.now_s
        prompts = self._prompts(
            batch, model, view, begun, lambda: self.pace_class.of(decodes, model, now_s)
        )
        view = without_rejected(batch, view)
        if prompts:
            make_way(batch, view, (request for request, _ in prompts))
            if self._worth.are_promises_alike:
                lend(batch, view, prompts, decodes)
        if batch.preempted:
            view = replace(view, running=_staying(view.running, batch))
            begun, decodes = _staying(begun, batch), _staying(decodes, batch)
            prompts = [timed for timed in prompts if not batch.has_left(timed[0])]
        decodes = sorted(decodes, key=attrgetter("deadline_s"))
        pace = self._pace(decodes, view)
        if view.swapped or batch.num_free_blocks < len(decodes):
            self._serve_short_of_memory(batch, pace, decodes, prompts, view)
        else:
            pack = self.pack_class(batch, view.now_s, begun)
            self._serve(pack, pace, decodes, prompts, view)
        return batch.build()

    def _planned_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        batch, model = self.new_batch(view, decodes), view.model
        if batch.num_free_tokens < 0:
            return None
        view = self._without_unkeepable(batch, view)
        pace = all_kept = self.pace_class.of_group(decodes, model, view.now_s, batch.shape)
        if not self._worth.is_known_of(pace):
            return None
        first_s = decodes.first_deadline_from
        pace = self._worth.kept(pace, model, lambda s: first_s(s) - view.now_s)
        if not view.running and batch.num_free_seqs <= 0:
            return self._beside_full_seats(batch, pace, decodes, view)
        prompts = self._prompts(batch, model, view, view.running, lambda: all_kept)
        if has_to_make_way(batch, decodes, view, [request for request, _ in prompts]):
            return None
        if prompts and self.long_steps(pace, view) is not None:
            return None
        if prompts and starving_tpot_s(pace, model) is not None:
            return None
        batch.time_limit_s = self.step_s(pace)
        have_seats = len(prompts) - len(view.running) <= batch.num_free_seqs
        seat_s = 0.0 if have_seats else pace.seat_s(decodes.output_tokens)
        supply = self.supply(pace, batch, view.now_s, seat_s)
        if not self.is_enough_for_all(pace, prompts, supply):
            return None
        pack = self.pack_class(batch, view.now_s, view.running)
        if lacks_blocks(prompts, pack.num_free_blocks, view):
            return None
        batch.has_reserve = _have_room(prompts, len(view.running), batch)
        self.spread(pace, prompts, supply, batch, view)
        pack.add(r for r, _ in prompts)
        return batch.build()

    def _beside_full_seats(
        self, batch: BatchBuilder, pace: Pace, decodes: DecodeGroup, view: SchedulerView
    ) -> SchedulerOutput | None:
        """Plan beside decodes that leave no seat: prompts can be rejected, but none can start.

        Returns None if a decode may have to give way.
        """
        waiting, model, now_s = view.waiting, view.model, view.now_s
        batch.time_limit_s = self.step_s(pace)
        if pace.all_s >= batch.time_limit_s:
            return None
        if not waiting:
            return batch.build()
        longest = longest_tokens(waiting)
        most_blocks = min(len(waiting), MAX_ASKED) * -(-longest // view.kv.block_size)
        longest_s = model.predict_prefill(longest)
        if will_be_filled(most_blocks, view.kv):
            if not self._judge_leisure(batch, pace, decodes, view):
                return None
        else:  # It is not at leisure, and of those due later than this none is hopeless.
            self.timed(batch, model, due_by(waiting, now_s + longest_s)[:MAX_ASKED], now_s)
        if may_make_way(batch, decodes, view, longest_s):
            return None
        return batch.build() if self.long_steps(pace, view) is None else None

    def _judge_leisure(
        self, batch: BatchBuilder, pace: Pace, decodes: DecodeGroup, view: SchedulerView
    ) -> bool:
        """Reject prompts, and note whether the others have time although none can start.

        Returns False if only a look at each decode tells whether KV blocks are short.
        """
        prompts = self._prompts(batch, view.model, view, (), lambda: pace)
        supply = self.supply(pace, batch, view.now_s, pace.seat_s(decodes.output_tokens))
        is_short = view.kv.num_free_blocks < decodes.num_decodes
        if is_short or not self.is_enough_for_all(pace, prompts, supply):
            return True
        pack = self.pack_class(batch, view.now_s, ())
        pack.reserved_blocks -= decodes.num_new_blocks  # `_serve` asks before these are taken.
        if lacks_blocks(prompts, pack.num_free_blocks, view):
            return are_few(pack.num_free_blocks, view)
        self.spread(pace, prompts, supply, batch, view)
        return True

    def choose_drafts(
        self, offers: Sequence[DraftOffer], output: SchedulerOutput, view: SchedulerView
    ) -> Sequence[int]:
        """Return the drafts that pay, in a step that makes no request late."""
        return drafts_in_time(offers, output, with_caution(self._drift.seen(view)))

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return `margin` before the first deadline: until then all decodes fit into a step.

        It is the margin of the largest TPOT, as the smaller ones may be such as cannot be kept.
        """
        if self._drift.is_measuring or decodes.num_decodes > limits.max_num_batched_tokens:
            return -math.inf
        tpot_s = max((t for t in decodes.num_by_tpot_s if t < math.inf), default=0.0)
        return decodes.first_deadline_s - self._margin * tpot_s

    # Parts of a decision, which a subclass may replace.

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
        kept = self._worth.least
        prompts, hopeless = split_unkeepable(shortage.prompts, shortage.view, kept)
        order = best_order(prompts, shortage.supply, self.fairness, self.ageing)
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

    def take_freed(self, pace: Pace, shortage: Shortage, pack: PromptPack) -> bool:
        """Add all decodes, and prompts as far as decodes free KV blocks, if there are few.

        Returns False, and adds nothing, if blocks are not short or time is shorter: beside decodes
        the step then has none for as many prompt tokens as they free.
        """
        view, decodes, prompts, _ = shortage
        batch, limit_s = pack.batch, pack.batch.time_limit_s
        if pace.all_s >= limit_s or not self._flood.is_short_of_blocks(pace, prompts, pack, view):
            return False
        if not self._flood.has_time_for_freed(pace, limit_s, view):
            return False
        pack.reserved_blocks += len(decodes)  # Each will need its next block soon.
        add_without_preempting(batch, decodes)
        tokens = tokens_in_turn(pace, decodes, view)
        batch.num_free_tokens = min(batch.num_free_tokens, tokens or batch.num_free_tokens)
        pack.add(self._flood.in_turn(self.order(shortage), prompts, pace, view, self.fairness))
        return True

    def give_way(self, pace: Pace, shortage: Shortage, order: Order, pack: PromptPack) -> None:
        """Fill the step of `pack` with the decodes and prompts of `shortage`.

        Where more decodes are late or due than it has time for, it holds all of them instead: if a
        few were served at a time, each few would pay the constant of a step, and ever more be late.
        Only a mean TPOT forgives that.
        """
        view, decodes, batch = shortage.view, shortage.decodes, pack.batch
        step_s, rule = batch.time_limit_s, view.limits.deadline_rule
        is_forgiven = rule is DeadlineRule.MEAN_TPOT and pace.all_s > step_s
        if is_forgiven and not are_all_due_in_time(batch, decodes, view):
            batch.time_limit_s = math.nextafter(pace.all_s, math.inf)
            add_without_preempting(batch, decodes)
            return
        if order.in_time:
            batch.time_limit_s = self.while_ahead_s(pace, shortage, step_s)
        due_s = view.now_s + (batch.time_limit_s + (self.due_steps - 1) * step_s)
        give_way(pack, decodes, order, view, due_s)

    def while_ahead_s(self, pace: Pace, shortage: Shortage, step_s: float) -> float:
        """Return the time limit of a step in which decodes give way, at least `step_s`."""
        return limit_while_ahead_s(pace, shortage.decodes, shortage.view, self._margin, step_s)

    def beside_decodes(
        self, pace: Pace, prompts: Sequence[Timed], view: SchedulerView
    ) -> Sequence[Timed]:
        """Return the prompts with the time that they add to steps that last a TPOT."""
        share = self._share(pace.all_s * pace.steps_per_s)
        budget_tokens = view.limits.max_num_batched_tokens
        return beside_decodes(prompts, pace, view.model, budget_tokens, share)

    def take_turns(self, long: LongSteps, pace: Pace, shortage: Shortage, pack: PromptPack) -> None:
        """Add all decodes, and the chunk of a long step as soon as they are ahead by as much."""
        view, decodes, prompts, supply = shortage
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
        order = self.order(Shortage(view, decodes, timed, supply))
        in_turn = [*order.in_time, *order.late]
        if is_short:
            in_turn = self._flood.in_turn(order, timed, pace, view, self.fairness)
        pack.add(in_turn)

    def spend_late_gap(
        self, tpot_s: float, pace: Pace, shortage: Shortage, pack: PromptPack
    ) -> bool:
        """Add all decodes, and once prompts are due whole ones, which makes decodes late.

        Fewer decodes may miss their SLO by it than prompts would.  `tpot_s` leaves no time for
        prompts.  Returns False, and adds nothing, if a larger TPOT leaves them time and not all
        decodes can afford a late gap.
        """
        view, decodes, prompts, supply = shortage
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

    def _pace(self, decodes: Sequence[Request], view: SchedulerView) -> Pace:
        """Return the pace of `decodes`, which are sorted by deadline, as far as it is worth it."""
        num, now_s = num_lost(decodes, view), view.now_s
        pace = self.pace_class.of(decodes, view.model, now_s, num)
        self._worth.judge(pace, decodes, view)
        return self._worth.kept(pace, view.model, lambda s: first_slack_s(decodes[num:], s, now_s))

    def _prompts(
        self,
        batch: BatchBuilder,
        model: LatencyModel,
        view: SchedulerView,
        begun: Iterable[Request],
        pace: Callable[[], Pace],
    ) -> list[Timed]:
        """Return the prompts that are worth a try, by deadline; reject the others.

        `pace` returns that of all decodes, of which only sums count.  It is asked where more
        prompts wait than a step looks at.
        """
        now_s, waiting = view.now_s, view.waiting
        prompts = self.timed(batch, model, begun, now_s)
        urgent = self.timed(batch, model, come_back(most_urgent(waiting), view.kv), now_s)
        goes_by_length = not (self.fairness or self.ageing)
        if len(waiting) > MAX_ASKED and batch.num_free_seqs > 0 and goes_by_length:
            tokens_per_s = tokens_per_s_beside(pace(), view, self.min_share)
            short = most_urgent_of_short(waiting, now_s, tokens_per_s)
            urgent += self.timed(batch, model, come_back(short, view.kv), now_s)
        return by_deadline(prompts + urgent)

    def _serve(
        self,
        pack: PromptPack,
        pace: Pace,
        decodes: Sequence[Request],
        prompts: Sequence[Timed],
        view: SchedulerView,
    ) -> None:
        """Fill the step of `pack`, as the class says, while every decode has its next block."""
        batch = pack.batch
        starving_s = starving_tpot_s(pace, view.model) if prompts else None
        if starving_s is not None:
            pace = self._unless_prompts_starve(pace, prompts, view)
        batch.time_limit_s = self.step_s(pace)
        supply = self.supply(
            pace, batch, view.now_s, pace.seat_s(sum([r.num_output_tokens for r in decodes]))
        )
        long = self.long_steps(pace, view) if prompts else None
        if long is not None:
            self.take_turns(long, pace, Shortage(view, decodes, prompts, supply), pack)
            return
        if starving_s is not None and view.limits.deadline_rule is DeadlineRule.TBT:
            shortage = Shortage(view, decodes, prompts, supply)
            if self.spend_late_gap(starving_s, pace, shortage, pack):
                return
        is_enough = self.is_enough_for_all(pace, prompts, supply)
        if not is_enough or self._flood.is_short_of_blocks(pace, prompts, pack, view):
            bare = self.at_bare_pace(pace, supply)
            timed = self.beside_decodes(pace, prompts, view)
            shortage = Shortage(view, decodes, timed, bare)
            if self.take_freed(pace, shortage, pack):
                return
            if not is_enough:
                self.give_way(pace, shortage, self.order(shortage), pack)
                return
        batch.has_reserve = _have_room(prompts, len(view.running) - len(decodes), batch)
        add_without_preempting(batch, decodes)
        self.spread(pace, prompts, supply, batch, view)
        pack.add(r for r, _ in prompts)

    def _unless_prompts_starve(
        self, pace: Pace, prompts: Sequence[Timed], view: SchedulerView
    ) -> Pace:
        """Return the pace at which prompts that are due soon have time beside the decodes.

        It is `pace` if none is due soon, or if a TPOT for which a decode asks is worth keeping.
        The rule `tbt` allows for late gaps instead.
        """
        least_s, limits = self._worth.least.tpot_s, view.limits
        if limits.deadline_rule is DeadlineRule.TBT or least_s <= pace.tiers[-1][0]:
            return pace
        step_s, budget_tokens = self.step_s(pace), limits.max_num_batched_tokens
        if not num_due_soon(prompts, pace, step_s, view.now_s, budget_tokens):
            return pace
        num_decodes = pace.shape.num_decodes
        return self.pace_class.of_sums({least_s: num_decodes}, math.inf, view.model, pace.shape)

    def _share(self, of_decodes: float) -> float:
        """Return the share of the device that prompts are planned with."""
        return max(self.min_share, 1 - of_decodes)

    def _serve_short_of_memory(
        self,
        batch: BatchBuilder,
        pace: Pace,
        decodes: Sequence[Request],
        prompts: Sequence[Timed],
        view: SchedulerView,
    ) -> None:
        """Preempt for decodes, bring swapped requests back, and only then go on with prompts."""
        begun, may_start = add_decodes(batch, replace(view, running=least_urgent_last(view)))
        batch.time_limit_s = max(self.step_s(pace), math.nextafter(pace.all_s, math.inf))
        prompts = [
            timed
            for timed in prompts
            if (may_start or timed[0].status is RequestStatus.RUNNING)
            and not batch.has_left(timed[0])
        ]
        supply = self.at_bare_pace(pace, self.supply(pace, batch, view.now_s))
        order = self.order(Shortage(view, decodes, prompts, supply))
        pack = self.pack_class(batch, view.now_s, begun)
        pack.add(self._flood.in_turn(order, prompts, pace, view, self.fairness))


def _staying(requests: Iterable[Request], batch: BatchBuilder) -> list[Request]:
    """Return the requests that the step neither preempts nor rejects."""
    return [request for request in requests if not batch.has_left(request)]


def _have_room(prompts: Sequence[Timed], num_begun: int, batch: BatchBuilder) -> bool:
    """Tell whether there are prompts, and seats for all that wait, as `num_begun` have theirs."""
    num_new = len(prompts) - num_begun
    are_all_known = num_new < MAX_ASKED
    return bool(prompts) and are_all_known and num_new <= batch.num_free_seqs
