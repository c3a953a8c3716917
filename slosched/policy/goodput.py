"""Our own: whoever can still be in time, in the order that keeps the most promises."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import (
    BatchShape,
    DeadlineRule,
    DecodeGroup,
    LatencyModel,
    Limits,
    Policy,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.decode_first import add_decodes
from slosched.policy.kit.deferred import add_without_preempting, num_in_time, serve_something
from slosched.policy.kit.drop import without_rejected
from slosched.policy.kit.punctual import (
    Order,
    Supply,
    Timed,
    are_in_time,
    best_order,
    by_deadline,
    most_urgent,
    reject_hopeless,
)

_RUNNING = RequestStatus.RUNNING
"""Hundreds are asked in a step; see `_punctual`."""
_TILE_TOKENS = 64
"""Rows of a matrix kernel's tile: a chunk that fills part of one pays for all of it."""


@dataclass
class Goodput(Policy):
    """The prompts that can be in time, beside the decodes; these give way while they have slack.

    1. Reject the requests without a token that would miss their TTFT even alone on the device.
    2. A step may last until the first decode is due, less `margin`; never longer than the smallest
       TPOT of the decodes, and always `shortest` of it: all that it may if one is late already.
    3. If all decodes fit into that, and the prompts that wait or have begun would all be in time
       in what they leave of every step, then every decode gets its token, and after them the
       prompts go by deadline.
    4. Otherwise decodes that are not due before the end of the step after this one may give way.
       Prompts are planned with the share of the device that decodes leave at the pace that their
       TPOTs ask for, and with the seats (`max_num_seqs`) that decodes leave as they end: Moore and
       Hodgson's rule makes the most of them punctual, the others are late.  If seats are scarcer
       than time and many are late, prompts go by length instead of by deadline.  The step takes the
       decodes that are due, the punctual prompts and the other decodes by deadline, then the late
       prompts (which are looked at anew in every step).
    5. A step that finishes a prompt ends before that one is due.  The first prompt that has to be
       cut ends with a whole tile of 64 tokens.
    6. Under `tbt`, which counts every gap, a step is as long as it hardly ever exceeds; under the
       other rules, which forgive a slow step, as long as is expected.

    Giving way costs nothing in tokens, and it lets a burst of prompts pass before decodes that
    are ahead of their TPOT.  But being ahead is what protects a decode from the next slow step,
    and decodes at their bare pace hold seats and KV cache for longer: experiments/goodput has the
    figures of this and of what else was tried.

    Source: ours, from algorithm g of our study (reference/goodput-study.md, section 10); Moore
    (1968), https://doi.org/10.1287/mnsc.15.1.102.  The correction of the model's bias is the
    `OnlineModel`'s.  Output lengths are not known to it.
    """

    margin: float = tunable(0.05, 0.1)
    """Share of the smallest TPOT by which a step ends before the first decode is due."""
    shortest: float = tunable(0.65, 0.9)
    """Share of the smallest TPOT that a step may always last."""
    fairness: float = 0.0
    """Share of the prompts whose length does not count against them when not all can be in time: at
    0 the longest goes, so that the most requests are good; at 1 the one that takes longest for its
    length, so that about the most tokens are."""
    min_share: float = 0.1
    """Share of the device that prefills are planned with at least."""

    def __post_init__(self) -> None:
        if not 0 <= self.margin < 1:
            raise ValueError(f"margin must be in [0, 1), not {self.margin}")
        if not 0 < self.shortest <= 1:
            raise ValueError(f"shortest must be in (0, 1], not {self.shortest}")
        if not 0 <= self.fairness <= 1:
            raise ValueError(f"fairness must be in [0, 1], not {self.fairness}")
        if not 0 < self.min_share <= 1:
            raise ValueError(f"min_share must be in (0, 1], not {self.min_share}")

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch, model = _builder(view), _model(view)
        begun: list[Request] = []
        decodes: list[Request] = []
        for request in view.running:
            (decodes if request.is_decode else begun).append(request)
        prompts = _prompts(batch, model, view, begun)
        view = without_rejected(batch, view)
        decodes.sort(key=attrgetter("deadline_s"))
        pace = _Pace.of(decodes, model, view.now_s)
        if view.swapped or batch.num_free_blocks < len(decodes):
            self._serve_short_of_memory(batch, view, pace, prompts)
            return batch.build()
        batch.time_limit_s = self._step_s(pace)
        supply = self._supply(pace, batch, view.now_s, _seat_s(decodes, pace))
        if self._is_enough_for_all(pace, prompts, supply):
            add_without_preempting(batch, decodes)
            _Pack(batch, view.now_s, begun).add(r for r, _ in prompts)
            return batch.build()
        paced = supply._replace(share=self._share(pace.all_s * pace.steps_per_s))
        order = best_order(prompts, paced, self.fairness)
        _give_way(batch, view.now_s, decodes, order, _Pack(batch, view.now_s, begun))
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """While no decode has to give way."""
        batch, model = _builder(view, decodes), _model(view)
        if batch.num_free_tokens < 0:
            return None
        pace = _Pace.of_group(decodes, model, view.now_s, batch.shape)
        prompts = _prompts(batch, model, view, view.running)
        if len(prompts) - len(view.running) > batch.num_free_seqs:
            return None
        batch.time_limit_s = self._step_s(pace)
        supply = self._supply(pace, batch, view.now_s)
        if not self._is_enough_for_all(pace, prompts, supply):
            return None
        _Pack(batch, view.now_s, view.running).add(r for r, _ in prompts)
        return batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """While each step ends so long before the first decode is due, all of them fit."""
        if decodes.num_decodes > limits.max_num_batched_tokens:
            return -math.inf
        tpot_s = min(decodes.num_by_tpot_s)
        return math.inf if tpot_s == math.inf else decodes.first_deadline_s - self.margin * tpot_s

    def _step_s(self, pace: _Pace) -> float:
        return min(self._longest_s(pace), pace.tpot_s)

    def _longest_s(self, pace: _Pace) -> float:
        """How long a step may last for the decodes."""
        if pace.tpot_s == math.inf:
            return math.inf
        slack_s = pace.first_slack_s - self.margin * pace.tpot_s
        return max(slack_s, self.shortest * pace.tpot_s)

    def _is_enough_for_all(self, pace: _Pace, prompts: Sequence[Timed], supply: Supply) -> bool:
        """True if steps have time for all decodes, and leave enough for all prompts."""
        if not prompts:
            return pace.all_s < self._longest_s(pace)
        return pace.all_s < self._step_s(pace) and are_in_time(prompts, supply)

    def _supply(
        self, pace: _Pace, batch: BatchBuilder, now_s: float, seat_s: float = 0.0
    ) -> Supply:
        """For prompts, while every step holds all decodes."""
        share = self._share(pace.all_s / pace.tpot_s)
        return Supply(now_s + pace.all_s, share, batch.num_free_seqs, seat_s)

    def _share(self, of_decodes: float) -> float:
        return max(self.min_share, 1 - of_decodes)

    def _serve_short_of_memory(
        self, batch: BatchBuilder, view: SchedulerView, pace: _Pace, prompts: list[Timed]
    ) -> None:
        """Preempt for decodes, bring swapped requests back, and only then go on with prompts."""
        begun, may_start = add_decodes(batch, view)
        batch.time_limit_s = max(self._step_s(pace), math.nextafter(pace.all_s, math.inf))
        left = [
            timed
            for timed in prompts
            if not batch.has_left(timed[0]) and (may_start or timed[0].status is _RUNNING)
        ]
        _Pack(batch, view.now_s, begun).add(r for r, _ in left)


def _model(view: SchedulerView) -> LatencyModel:
    if view.latency_model is None:
        raise ValueError("goodput predicts every batch: give the scheduler a latency model")
    return view.latency_model


def _builder(view: SchedulerView, beside: DecodeGroup | None = None) -> BatchBuilder:
    """Under `tbt` every gap counts, so that a step must end in time though it be a slow one."""
    is_cautious = view.limits.deadline_rule is DeadlineRule.TBT
    return BatchBuilder(view, beside=beside, cautious=is_cautious)


def _prompts(
    batch: BatchBuilder, model: LatencyModel, view: SchedulerView, begun: Iterable[Request]
) -> list[Timed]:
    """Prompts that can be in time, by deadline; the others are rejected."""
    timed = reject_hopeless(batch, model, begun, view.now_s)
    timed += reject_hopeless(batch, model, most_urgent(view.waiting), view.now_s)
    return by_deadline(timed)


def _seat_s(decodes: Sequence[Request], pace: _Pace) -> float:
    """Time of decodes alone until one of them ends.

    Output lengths are not known, but in a steady state decodes have as many tokens before them as
    behind them, on average: twice what they have emitted is how long they stay, and of n decodes
    one ends with each n-th part of that.
    """
    stay_tokens = 2 * sum([r.num_output_tokens for r in decodes]) / max(1, len(decodes))
    return pace.all_s * stay_tokens / max(1, len(decodes))


@dataclass(slots=True)
class _Pace:
    """What the decodes ask of every step."""

    all_s: float
    """Time of a step of all of them and nothing else; 0 if there are none."""
    first_slack_s: float
    """Until the first of those is due; below zero if it is late."""
    tpot_s: float
    """The smallest that was promised."""
    steps_per_s: float
    """How often they must all run, on average over them."""

    @classmethod
    def of(cls, decodes: Sequence[Request], model: LatencyModel, now_s: float) -> _Pace:
        """`decodes` are sorted by deadline."""
        shape = BatchShape()
        if decodes:
            shape.add_decodes([r.num_computed_tokens + 1 for r in decodes])
        tpots_s = Counter([r.slo.tpot_s for r in decodes])
        first_slack_s = decodes[0].deadline_s - now_s if decodes else 0.0
        return cls._of(tpots_s, first_slack_s, model, shape)

    @classmethod
    def of_group(
        cls, decodes: DecodeGroup, model: LatencyModel, now_s: float, shape: BatchShape
    ) -> _Pace:
        return cls._of(decodes.num_by_tpot_s, decodes.first_deadline_s - now_s, model, shape)

    @classmethod
    def _of(
        cls,
        num_by_tpot_s: Mapping[float, int],
        first_slack_s: float,
        model: LatencyModel,
        shape: BatchShape,
    ) -> _Pace:
        num_decodes = sum(num_by_tpot_s.values())
        if not num_decodes:
            return cls(0.0, math.inf, math.inf, 0.0)
        # In a fixed order: sums of floats depend on it.
        tokens_per_s = sum(num / tpot_s for tpot_s, num in sorted(num_by_tpot_s.items()))
        return cls(
            model.predict(shape), first_slack_s, min(num_by_tpot_s), tokens_per_s / num_decodes
        )


def _give_way(
    batch: BatchBuilder, now_s: float, decodes: Sequence[Request], order: Order, pack: _Pack
) -> None:
    """Decodes that are due, then punctual prompts and other decodes by deadline, then the rest.

    `decodes` are sorted by deadline.
    """
    due_s = now_s + 2 * batch.time_limit_s
    at = _add_decodes(batch, decodes, 0, due_s)
    pack.reserved_blocks += len(decodes) - at
    if not at or decodes[at - 1] in batch:  # there was time for all that are due
        _merge(batch, decodes[at:], order, pack)
    if not batch.num_scheduled_tokens:
        serve_something(batch, decodes)


def _merge(batch: BatchBuilder, decodes: Sequence[Request], order: Order, pack: _Pack) -> None:
    at = 0
    for prompt in order.in_time:
        at = _add_decodes(batch, decodes, at, prompt.deadline_s)
        if not pack.add((prompt,)):
            return
    _add_decodes(batch, decodes, at, math.inf)
    pack.add(order.late)


def _add_decodes(
    batch: BatchBuilder, decodes: Sequence[Request], first: int, until_s: float
) -> int:
    """Those from `first` on that are due by `until_s`, if there is time; where the next begin."""
    end = bisect_right(decodes, until_s, lo=first, key=attrgetter("deadline_s"))
    if end > first:
        wanted = decodes[first:end]
        add_without_preempting(batch, wanted[: num_in_time(batch, wanted)])
    return end


class _Pack:
    """Adds prompts to a step, until one of them has to be cut."""

    def __init__(self, batch: BatchBuilder, now_s: float, begun: Iterable[Request]) -> None:
        """`begun` are the prompts that hold KV blocks, and are promised more."""
        self._batch, self._now_s = batch, now_s
        self.reserved_blocks = batch.blocks_promised(begun)
        """KV blocks that are not for prompts that start now."""
        self._is_blocked = False
        self._is_full = False

    def add(self, prompts: Iterable[Request]) -> bool:
        """In order; False once the step is full.

        The first waiting prompt without room in the KV cache keeps those behind it out.
        """
        if self._batch.num_free_seqs <= 0:  # and then hundreds may wait for one
            prompts = [r for r in prompts if r.status is _RUNNING]
        for request in prompts:
            if self._is_full or self._batch.num_free_tokens <= 0:
                return False
            if self._has_room(request):
                self._is_full = not self._add_chunk(request)
        return not self._is_full

    def _has_room(self, request: Request) -> bool:
        batch = self._batch
        if request.status is _RUNNING:
            self.reserved_blocks -= batch.blocks_promised((request,))
            return True
        if self._is_blocked or batch.num_free_seqs <= 0:
            return False
        self._is_blocked = not batch.fits_whole(request, self.reserved_blocks)
        return not self._is_blocked

    def _add_chunk(self, request: Request) -> bool:
        """False if it had to be cut."""
        batch = self._batch
        n = batch.largest_chunk(request)
        if n < request.num_uncomputed_tokens:
            beyond = (batch.shape.num_tokens + n) % _TILE_TOKENS
            batch.add(request, n - beyond if n > beyond else n)
            return False
        batch.add(request)
        self.reserved_blocks += batch.blocks_promised((request,))
        slack_s, predicted_s = request.deadline_s - self._now_s, batch.predicted_s
        if predicted_s is not None and predicted_s < slack_s < batch.time_limit_s:
            batch.time_limit_s = slack_s
        return True
