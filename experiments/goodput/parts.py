"""What stands in the place of goodput's parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slosched.batch import BatchBuilder
from slosched.core import (
    BatchShape,
    DecodeGroup,
    EndReason,
    LatencyModel,
    Request,
    SchedulerOutput,
    SchedulerView,
)
from slosched.policy.goodput import Goodput, _add_decodes, _merge, _Pace, _Pack
from slosched.policy.kit.deferred import add_without_preempting, serve_something
from slosched.policy.kit.punctual import Order, Supply, Timed, are_in_time, best_order, most_in_time


def all_decodes_first(
    batch: BatchBuilder, _: float, decodes: Sequence[Request], order: Order, pack: _Pack
) -> None:
    """No decode gives way."""
    add_without_preempting(batch, decodes)
    pack.add(order.in_time)
    pack.add(order.late)
    if not batch.num_scheduled_tokens:
        serve_something(batch, decodes)


def only_due_now(
    batch: BatchBuilder, now_s: float, decodes: Sequence[Request], order: Order, pack: _Pack
) -> None:
    """Decodes are due in the last step that is in time, not one step before."""
    at = _add_decodes(batch, decodes, 0, now_s + batch.time_limit_s)
    pack.reserved_blocks += len(decodes) - at
    if not at or decodes[at - 1] in batch:
        _merge(batch, decodes[at:], order, pack)
    if not batch.num_scheduled_tokens:
        serve_something(batch, decodes)


def everyone_by_deadline(ordered: Sequence[Timed], _: Supply, __: float = 0.0) -> Order:
    """Instead of Moore and Hodgson's rule."""
    return Order([request for request, _ in ordered], [])


def reject_expired(
    batch: BatchBuilder, model: LatencyModel, prefills: Iterable[Request], now_s: float
) -> list[Timed]:
    """`reject_hopeless` that waits until the deadline has passed."""
    timed = []
    for request in prefills:
        if request.deadline_s < now_s and not request.num_output_tokens:
            batch.reject(request, EndReason.EXPIRED)
            continue
        known = request.num_prompt_tokens + request.num_output_tokens
        computed = request.num_computed_tokens
        timed.append((request, model.predict_prefill(known - computed, computed)))
    return timed


def blind_to_seats(ordered: Sequence[Timed], supply: Supply, fairness: float = 0.0) -> Order:
    """Time is all that prompts want."""
    return most_in_time(ordered, supply._replace(num_free_seats=math.inf), fairness)


def seats_twice_as_often(ordered: Sequence[Timed], supply: Supply, fairness: float = 0.0) -> Order:
    """As if decodes left their seats after what they have ahead of them, not after all."""
    return best_order(ordered, supply._replace(seat_s=supply.seat_s / 2), fairness)


def shortest_first(ordered: Sequence[Timed], supply: Supply, fairness: float = 0.0) -> Order:
    """The punctual ones by length, and then the late ones by length."""
    found = most_in_time(ordered, supply, fairness)
    alone_s = {r.request_id: alone_s for r, alone_s in ordered}

    def by_length(requests: list[Request]) -> list[Request]:
        return sorted(requests, key=lambda r: alone_s[r.request_id])

    return Order(by_length(found.in_time), by_length(found.late))


def least_committed(ordered: Sequence[Timed], supply: Supply, fairness: float = 0.0) -> Order:
    """The shortest of the punctual ones that can go ahead without making another late, and again.

    Long ones wait as long as they can, so that they are what is given up if more arrive.
    """
    found = most_in_time(ordered, supply, fairness)
    if not found.late:
        return found
    punctual = {r.request_id for r in found.in_time}
    left = [(r, alone_s) for r, alone_s in ordered if r.request_id in punctual]
    end_s = np.cumsum([alone_s for _, alone_s in left])
    slack_s = [
        (r.deadline_s - supply.start_s) * supply.share - end
        for (r, _), end in zip(left, end_s, strict=True)
    ]
    first = []
    while left:
        at = _shortest_that_may(left, slack_s)
        request, alone_s = left.pop(at)
        slack_s = [s - alone_s for s in slack_s[:at]] + slack_s[at + 1 :]
        first.append(request)
    return Order(first, found.late)


def _shortest_that_may(left: Sequence[Timed], slack_s: Sequence[float]) -> int:
    """Who goes ahead delays all before it, by as much as it takes."""
    least_s, at = math.inf, 0
    for i, (_, alone_s) in enumerate(left):
        if alone_s < left[at][1] and alone_s <= least_s:
            at = i
        least_s = min(least_s, slack_s[i])
    return at


def cautious(view: SchedulerView, beside: DecodeGroup | None = None) -> BatchBuilder:
    """Predicts what a step hardly ever exceeds, under every deadline rule."""
    return BatchBuilder(view, beside=beside, cautious=True)


class NoEnd(_Pack):
    """Goes on after a prompt that is done, though that one is due before the step ends."""

    def _add_chunk(self, request: Request) -> bool:
        time_limit_s = self._batch.time_limit_s
        is_whole = super()._add_chunk(request)
        self._batch.time_limit_s = time_limit_s
        return is_whole


class LateLeftOut(_Pace):
    """Decodes that are late already do not shorten a step."""

    @classmethod
    def of(cls, decodes: Sequence[Request], model: LatencyModel, now_s: float) -> LateLeftOut:
        pace = super().of(decodes, model, now_s)
        least_s = model.predict_prefill(1)
        slacks_s = (r.deadline_s - now_s for r in decodes)
        first_slack_s = min((s for s in slacks_s if s >= least_s), default=0.0)
        return cls(pace.all_s, first_slack_s, pace.tpot_s, pace.steps_per_s)


@dataclass
class WithFloor(_Pace):
    """Knows how long a step of all decodes and 128 tokens of a prompt takes."""

    floor_s: float = 0.0

    @classmethod
    def _of(
        cls,
        num_by_tpot_s: Mapping[float, int],
        first_slack_s: float,
        model: LatencyModel,
        shape: BatchShape,
    ) -> WithFloor:
        pace = _Pace._of(num_by_tpot_s, first_slack_s, model, shape)
        sums = shape.sums
        shape.add(128, 0)
        floor_s = model.predict(shape)
        shape.restore(sums)
        return cls(pace.all_s, pace.first_slack_s, pace.tpot_s, pace.steps_per_s, floor_s)


class AlwaysGivesWay(Goodput):
    """Whenever a prompt waits or has begun."""

    def _is_enough_for_all(self, pace: _Pace, prompts: Sequence[Timed], supply: Supply) -> bool:
        return not prompts and super()._is_enough_for_all(pace, prompts, supply)


class AsksWhenLate(Goodput):
    """Looks at every decode once the first is late; with `LateLeftOut`."""

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        assert view.latency_model is not None
        if decodes.first_deadline_s - view.now_s < view.latency_model.predict_prefill(1):
            return None
        return super().schedule_beside(decodes, view)


class OwnPace(Goodput):
    """Gives way where prompts would be late beside decodes at the pace of their TPOTs."""

    def _is_enough_for_all(self, pace: _Pace, prompts: Sequence[Timed], supply: Supply) -> bool:
        if not prompts:
            return super()._is_enough_for_all(pace, prompts, supply)
        paced = supply._replace(share=self._share(pace.all_s * pace.steps_per_s))
        return pace.all_s < self._step_s(pace) and are_in_time(prompts, paced)


class LongSteps(Goodput):
    """As long as the slack allows."""

    def _step_s(self, pace: _Pace) -> float:
        return self._longest_s(pace)


class StudysFloor(Goodput):
    """A step may always have 128 tokens beside all decodes; with `WithFloor`."""

    def _step_s(self, pace: _Pace) -> float:
        floor_s = math.nextafter(pace.floor_s, math.inf) if isinstance(pace, WithFloor) else 0.0
        return max(super()._step_s(pace), floor_s)
