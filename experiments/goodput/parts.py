"""Goodput with one of its parts replaced."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

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
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.giving_way import serve_all_decodes
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Order, Supply, Timed, are_in_time, most_in_time
from slosched.policy.kit.shortage import Shortage
from slosched.policy.kit.worth import Worth


class NeverGivesWay(Goodput):
    """A variant in which every decode gets its token in every step."""

    def give_way(
        self,
        shortage: Shortage,
        order: Order,
        pack: PromptPack,
    ) -> None:
        serve_all_decodes(pack, shortage.decodes, order)


class AlwaysGivesWay(Goodput):
    """A variant in which decodes give way whenever a prompt waits or has begun."""

    def is_enough_for_all(self, pace: Pace, prompts: Sequence[Timed], supply: Supply) -> bool:
        return not prompts and super().is_enough_for_all(pace, prompts, supply)


class GivesWayLater(Goodput):
    """Decodes give way only if prompts would be late beside decodes at the pace of their TPOTs."""

    def is_enough_for_all(self, pace: Pace, prompts: Sequence[Timed], supply: Supply) -> bool:
        if not prompts:
            return super().is_enough_for_all(pace, prompts, supply)
        in_time = are_in_time(prompts, self.at_bare_pace(pace, supply))
        return pace.all_s < self.step_s(pace) and in_time


class GivesWayToTheLast(Goodput):
    """Decodes are due in the last step that is in time for them, not in the one before it."""

    due_steps = 1


class LongSteps(Goodput):
    """A step may last longer than the smallest TPOT if the slack allows it."""

    def step_s(self, pace: Pace) -> float:
        return self.longest_s(pace)


class NoEnd(PromptPack):
    """A step that takes more work after it finishes a prompt, even if the prompt then is late."""

    def add_chunk(self, request: Request) -> bool:
        time_limit_s = self.batch.time_limit_s
        is_whole = super().add_chunk(request)
        self.batch.time_limit_s = time_limit_s
        return is_whole


class NoEndForAPrompt(Goodput):
    """A step that finishes a prompt may last until after that prompt is due."""

    pack_class = NoEnd


class PaceOfThePunctual(Pace):
    """A pace in which decodes that are late already do not shorten a step."""

    @classmethod
    def of(
        cls, decodes: Sequence[Request], model: LatencyModel, now_s: float, num_lost: int = 0
    ) -> Self:
        pace = super().of(decodes, model, now_s, num_lost)
        least_s = model.predict_prefill(1)
        slacks_s = (r.deadline_s - now_s for r in decodes)
        pace.first_slack_s = min((s for s in slacks_s if s >= least_s), default=0.0)
        return pace


class LateDecodesLeftOut(Goodput):
    """Decodes that are late already do not shorten a step."""

    pace_class = PaceOfThePunctual

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Return None, so that every decode is looked at, if the first one is late."""
        if decodes.first_deadline_s - view.now_s < view.model.predict_prefill(1):
            return None
        return super().schedule_beside(decodes, view)


class PaceOfTheTightest(Pace):
    """A pace set by the smallest TPOT, whether it can be kept or not."""

    @classmethod
    def of_sums(
        cls,
        num_by_tpot_s: Mapping[float, int],
        first_slack_s: float,
        model: LatencyModel,
        shape: BatchShape,
    ) -> Self:
        pace = super().of_sums(num_by_tpot_s, first_slack_s, model, shape)
        pace.tpot_s, pace.least_s = min(num_by_tpot_s, default=math.inf), 0.0
        num_decodes = max(1, sum(num_by_tpot_s.values()))
        tokens_per_s = sum(num / tpot_s for tpot_s, num in sorted(num_by_tpot_s.items()))
        pace.steps_per_s = tokens_per_s / num_decodes
        return pace


class AllWorthKeeping(Worth):
    """Every TPOT is worth keeping, however few prompts go through."""

    def judge(self, pace: Pace, decodes: Sequence[Request], view: SchedulerView) -> None:
        """Judge nothing."""

    def is_known_of(self, pace: Pace) -> bool:  # noqa: ARG002  # it depends on no pace
        return True


class KeepsEveryTpot(Goodput):
    """goodput that gives up no TPOT that can be kept."""

    worth_class = AllWorthKeeping


class TightestBinds(KeepsEveryTpot):
    """The smallest TPOT limits the step, also if it cannot be kept."""

    pace_class = PaceOfTheTightest


@dataclass
class PaceWithFloor(Pace):
    """A pace that knows how long a step of all decodes and 128 tokens of a prompt takes."""

    floor_s: float = 0.0

    @classmethod
    def of_sums(
        cls,
        num_by_tpot_s: Mapping[float, int],
        first_slack_s: float,
        model: LatencyModel,
        shape: BatchShape,
    ) -> Self:
        pace = super().of_sums(num_by_tpot_s, first_slack_s, model, shape)
        sums = shape.sums
        shape.add(128, 0)
        pace.floor_s = model.predict(shape)
        shape.restore(sums)
        return pace


class WithFloor(Goodput):
    """A step always has time for 128 tokens of a prompt beside all decodes."""

    pace_class = PaceWithFloor

    def step_s(self, pace: Pace) -> float:
        floor_s = math.nextafter(pace.floor_s, math.inf) if isinstance(pace, PaceWithFloor) else 0.0
        return max(super().step_s(pace), floor_s)


class AlgorithmG(WithFloor, NeverGivesWay):
    """A step has that floor, and no decode gives way."""


class UpperQuantile(Goodput):
    """A step is limited by the time that it hardly ever exceeds, under every deadline rule."""

    def new_batch(self, view: SchedulerView, beside: DecodeGroup | None = None) -> BatchBuilder:
        return BatchBuilder(view, beside=beside, cautious=True)


class EveryoneByDeadline(Goodput):
    """All prompts go by deadline, without Moore and Hodgson's rule."""

    def order(self, shortage: Shortage) -> Order:
        return Order([request for request, _ in shortage.prompts], [])


class BlindToSeats(Goodput):
    """Prompts are planned as if there were seats for all of them."""

    def order(self, shortage: Shortage) -> Order:
        supply = shortage.supply._replace(num_free_seats=math.inf)
        return most_in_time(shortage.prompts, supply, self.fairness)


class SeatsTwiceAsOften(Goodput):
    """Decodes are expected to leave their seats after half of their stay."""

    def order(self, shortage: Shortage) -> Order:
        supply = shortage.supply._replace(seat_s=shortage.supply.seat_s / 2)
        return super().order(shortage._replace(supply=supply))


class ByDeadlineWithoutSeats(Goodput):
    """Seats are counted, but prompts go by deadline even if seats are scarcer than time."""

    def order(self, shortage: Shortage) -> Order:
        return most_in_time(shortage.prompts, shortage.supply, self.fairness)


class ShortestFirst(Goodput):
    """The punctual prompts go by length, and after them the late ones by length."""

    def order(self, shortage: Shortage) -> Order:
        found = most_in_time(shortage.prompts, shortage.supply, self.fairness)
        alone_s = {r.request_id: alone_s for r, alone_s in shortage.prompts}

        def by_length(requests: list[Request]) -> list[Request]:
            return sorted(requests, key=lambda r: alone_s[r.request_id])

        return Order(by_length(found.in_time), by_length(found.late))


class LeastCommitment(Goodput):
    """The next prompt is always the shortest punctual one that makes no other prompt late.

    Long prompts wait as long as they can, so that they are given up if more arrive.
    """

    def order(self, shortage: Shortage) -> Order:
        found = most_in_time(shortage.prompts, shortage.supply, self.fairness)
        if not found.late:
            return found
        punctual = {r.request_id for r in found.in_time}
        left = [(r, alone_s) for r, alone_s in shortage.prompts if r.request_id in punctual]
        return Order(_least_committed(left, shortage.supply), found.late)


def _least_committed(left: list[Timed], supply: Supply) -> list[Request]:
    """Return the prompts of `left` in the order of `LeastCommitment`; `left` is emptied."""
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
    return first


def _shortest_that_may(left: Sequence[Timed], slack_s: Sequence[float]) -> int:
    """Return the place of the shortest prompt that can go first without making another one late.

    A prompt that goes first delays all those before it in `left` by its own time.
    """
    least_s, at = math.inf, 0
    for i, (_, alone_s) in enumerate(left):
        if alone_s < left[at][1] and alone_s <= least_s:
            at = i
        least_s = min(least_s, slack_s[i])
    return at


class RejectExpired(Goodput):
    """A prompt is rejected when its deadline has passed, not as soon as it cannot be in time."""

    def timed(
        self, batch: BatchBuilder, model: LatencyModel, prompts: Iterable[Request], now_s: float
    ) -> list[Timed]:
        timed = []
        for request in prompts:
            if request.deadline_s < now_s and not request.num_output_tokens:
                batch.reject(request, EndReason.EXPIRED)
                continue
            known = request.num_prompt_tokens + request.num_output_tokens
            computed = request.num_computed_tokens
            timed.append((request, model.predict_prefill(known - computed, computed)))
        return timed


class AnyChunk(PromptPack):
    """A chunk may end anywhere."""

    tile_tokens = 1


class NoTiles(Goodput):
    """Chunks end anywhere, not with a whole tile."""

    pack_class = AnyChunk
