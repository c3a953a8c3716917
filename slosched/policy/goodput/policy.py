"""Our own policy: it serves the prompts that can still be in time, in the best order it finds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

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
)
from slosched.policy.goodput.parts import GoodputParts
from slosched.policy.kit.caution import with_caution
from slosched.policy.kit.decode_first import add_decodes, split_running
from slosched.policy.kit.deferred import add_without_preempting
from slosched.policy.kit.drafts import drafts_in_time
from slosched.policy.kit.drift import Drift
from slosched.policy.kit.drop import without_rejected
from slosched.policy.kit.late_gaps import num_due_soon, starving_tpot_s
from slosched.policy.kit.lending import lend
from slosched.policy.kit.lost import may_be_lost, num_lost
from slosched.policy.kit.make_way import come_back, has_to_make_way, make_way, may_make_way
from slosched.policy.kit.memory import are_few, lacks_blocks, will_be_filled
from slosched.policy.kit.pace import Pace, first_slack_s
from slosched.policy.kit.pausing import least_urgent_last, tokens_per_s_beside
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import (
    MAX_ASKED,
    Timed,
    by_deadline,
    most_urgent,
    most_urgent_of_short,
)
from slosched.policy.kit.shortage import Shortage
from slosched.policy.kit.unkeepable import unkeepable

_BESIDE_CAUTION = 0.2
"""Share of `margin` that is left where a step is planned with a time that it hardly ever exceeds:
where steps scatter little, no more is needed, and where they scatter much, more was left already.
"""


@dataclass
class Goodput(GoodputParts, PlansBesideDecodes, ForeseesDecodes):
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
       time and many prompts are late, prompts go by length instead of by deadline.  Prompts that
       are too long for what arrives in the long run go behind the punctual ones (kit/long_run.py),
       but not while KV blocks are short and few requests were paused for prompts.  The step takes
       the decodes that are due, then the punctual prompts and the other decodes by deadline, then
       the late prompts, and last those whose TPOT is not kept.  The next step plans all of them
       anew.  No decode gives way if it has time while prompts lack seats, since it would keep
       its own for longer.  A prompt counts by the time that it adds to steps of decodes, not by the
       time that it takes alone.  If all decodes are ahead, and prompts go faster in full steps,
       the step lasts until shortly before the first decode is due (kit/while_ahead.py).
    5. On some devices most of the time of a chunk is spent on its first tokens.  There prompts go
       faster in steps longer than a TPOT (`LongSteps`): no prompt runs until each decode is ahead
       by a long step, and then a whole chunk runs beside all of them.  The steps between leave out
       decodes that ask for much more than the TPOT kept and are ahead.
    6. While KV blocks are scarcer than time (kit/memory.py), no decode gives way, and a step takes
       about as many prompt tokens as decodes free in it, and an eighth of what is free.  A decode
       that lacks a block gets it from the one that is furthest ahead (kit/pausing.py), and so do
       prompts that are due soon, if it is ahead by much more than it takes to compute it anew
       (kit/lending.py), and if nearly all ask for the same TPOT.  If more prompts arrive than
       decodes make room for, they go by length.
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

    A subclass may replace each part of a decision (`GoodputParts`).

    Source: ours, with the rule of Moore (1968), https://doi.org/10.1287/mnsc.15.1.102.  The policy
    knows no output lengths.
    """

    def reset(self) -> None:
        super().reset()
        self._drift = Drift()
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
        self._unkeepable += unkeepable(self._arrivals.see(view.waiting), view)

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
            if self._arrivals.are_promises_alike:
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
            self.take_turns(long, Shortage(view, decodes, prompts, supply, pace), pack)
            return
        if starving_s is not None and view.limits.deadline_rule is DeadlineRule.TBT:
            shortage = Shortage(view, decodes, prompts, supply, pace)
            if self.spend_late_gap(starving_s, shortage, pack):
                return
        is_enough = self.is_enough_for_all(pace, prompts, supply)
        if not is_enough or self._flood.is_short_of_blocks(pace, prompts, pack, view):
            bare = self.at_bare_pace(pace, supply)
            timed = self.beside_decodes(pace, prompts, view)
            shortage = Shortage(view, decodes, timed, bare, pace)
            if self.take_freed(shortage, pack):
                return
            if not is_enough:
                self.give_way(shortage, self.order(shortage), pack)
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
        order = self.order(Shortage(view, decodes, prompts, supply, pace))
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
