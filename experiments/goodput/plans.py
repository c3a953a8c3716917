"""Ideas that look at more than goodput does: at the decodes' bank, and at the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from unittest.mock import patch

import numpy as np

from experiments.goodput.parts import all_decodes_first
from slosched.batch import BatchBuilder
from slosched.core import DecodeGroup, Request, SchedulerOutput, SchedulerView
from slosched.policy import goodput
from slosched.policy.goodput import Goodput, _give_way, _Pace, _Pack
from slosched.policy.kit.punctual import Order, Supply, Timed


class BankInPlan(Goodput):
    """Until a prompt is due, decodes cost only the tokens that they owe by then."""

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        decodes = [r for r in view.running if r.is_decode]
        plan = partial(self._plan, decodes, view.now_s)
        with patch.object(goodput, "best_order", plan):
            return super().schedule(view)

    def _plan(
        self,
        decodes: Sequence[Request],
        now_s: float,
        ordered: Sequence[Timed],
        supply: Supply,
        *_: float,
    ) -> Order:
        until_s = np.array([r.deadline_s for r, _ in ordered]) - now_s
        left_s = until_s
        if decodes:
            due_s = np.array([r.deadline_s for r in decodes]) - now_s
            tpot_s = np.array([r.slo.tpot_s for r in decodes])
            owed = np.maximum(0.0, (until_s[:, np.newaxis] - due_s) / tpot_s + 1).sum(axis=1)
            left_s = until_s - (supply.start_s - now_s) / len(decodes) * owed
        room_s = np.maximum.accumulate(np.maximum(left_s, self.min_share * until_s))
        return most_within(ordered, room_s.tolist())


def most_within(ordered: Sequence[Timed], room_s: Sequence[float]) -> Order:
    """Moore and Hodgson, with how much prefill has time until each prompt is due."""
    end_s = 0.0
    kept: list[tuple[float, int]] = []
    late: set[int] = set()
    for i, (_, alone_s) in enumerate(ordered):
        heappush(kept, (-alone_s, i))
        end_s += alone_s
        while kept and end_s > room_s[i]:
            longest_s, at = heappop(kept)
            end_s += longest_s
            late.add(at)
    return Order(
        [r for i, (r, _) in enumerate(ordered) if i not in late],
        [r for i, (r, _) in enumerate(ordered) if i in late],
    )


@dataclass
class Hurry(Goodput):
    """While the KV cache is short no decode gives way, and steps last `shortest` of the TPOT.

    It is short if the prompts that wait would not leave `spare` of it free; and where decodes
    alone take longer than such a step all is as ever.
    """

    spare: float = 0.1
    count_seats: bool = False
    """Whether too few seats count as well."""
    only_in_step: bool = False
    """Steps are shorter, but decodes give way as ever."""
    _is_short: bool = field(default=False, init=False, repr=False)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        seats = view.limits.max_num_seqs - len(view.running)
        self._is_short = self._would_be_short(view, seats)
        with patch.object(goodput, "_give_way", self._give_way):
            return super().schedule(view)

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        seats = view.limits.max_num_seqs - len(view.running) - decodes.num_decodes
        self._is_short = self._would_be_short(view, seats)
        return super().schedule_beside(decodes, view)

    def _would_be_short(self, view: SchedulerView, num_seats: int) -> bool:
        if not view.waiting:
            return False
        begun = (r for r in view.running if not r.is_decode)
        tokens = sum(r.num_uncomputed_tokens for r in (*begun, *view.waiting))
        num_left = view.kv.num_free_blocks - tokens / view.kv.block_size
        is_short = num_left < self.spare * view.kv.num_blocks
        return is_short or (self.count_seats and num_seats < len(view.waiting))

    def _step_s(self, pace: _Pace) -> float:
        quick_s = self.shortest * pace.tpot_s
        self._is_short = self._is_short and pace.all_s < quick_s
        return quick_s if self._is_short else super()._step_s(pace)

    def _give_way(
        self,
        batch: BatchBuilder,
        now_s: float,
        decodes: Sequence[Request],
        order: Order,
        pack: _Pack,
    ) -> None:
        nobody = self._is_short and not self.only_in_step
        serve = all_decodes_first if nobody else _give_way
        serve(batch, now_s, decodes, order, pack)
