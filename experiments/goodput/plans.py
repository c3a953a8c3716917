"""Ideas that use more than goodput does: the tokens that decodes are ahead, and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from slosched.core import DecodeGroup, SchedulerOutput, SchedulerView
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.giving_way import serve_all_decodes
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Order, Timed
from slosched.policy.kit.shortage import Shortage


class BankInPlan(Goodput):
    """In the plan, decodes cost only the tokens that they owe until each prompt is due."""

    def order(self, shortage: Shortage) -> Order:
        view, _, prompts, supply, _ = shortage
        now_s = view.now_s
        decodes = [r for r in view.running if r.is_decode]
        until_s = np.array([r.deadline_s for r, _ in prompts]) - now_s
        left_s = until_s
        if decodes:
            due_s = np.array([r.deadline_s for r in decodes]) - now_s
            tpot_s = np.array([r.slo.tpot_s for r in decodes])
            owed = np.maximum(0.0, (until_s[:, np.newaxis] - due_s) / tpot_s + 1).sum(axis=1)
            left_s = until_s - (supply.start_s - now_s) / len(decodes) * owed
        room_s = np.maximum.accumulate(np.maximum(left_s, self.min_share * until_s))
        return most_within(prompts, room_s.tolist())


def most_within(ordered: Sequence[Timed], room_s: Sequence[float]) -> Order:
    """Return Moore and Hodgson's order, given the time for prefill until each prompt is due."""
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
    """While the KV cache is short, no decode gives way and steps last `shortest` of the TPOT.

    The cache is short if the waiting prompts would leave less than the share `spare` of it free.
    If decodes alone take longer than such a step, the policy does what goodput does.
    """

    spare: float = 0.1
    count_seats: bool = False
    """Whether the policy also hurries while there are fewer free seats than waiting prompts."""
    only_in_step: bool = False
    """Whether hurrying only shortens steps, while decodes give way as in goodput."""
    _is_short: bool = field(default=False, init=False, repr=False)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        seats = view.limits.max_num_seqs - len(view.running)
        self._is_short = self._would_be_short(view, seats)
        return super().schedule(view)

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        seats = view.limits.max_num_seqs - len(view.running) - decodes.num_decodes
        self._is_short = self._would_be_short(view, seats)
        return super().schedule_beside(decodes, view)

    def step_s(self, pace: Pace) -> float:
        quick_s = self.shortest * pace.tpot_s
        self._is_short = self._is_short and pace.all_s < quick_s
        return quick_s if self._is_short else super().step_s(pace)

    def give_way(self, shortage: Shortage, order: Order, pack: PromptPack) -> None:
        if self._is_short and not self.only_in_step:
            serve_all_decodes(pack, shortage.decodes, order)
        else:
            super().give_way(shortage, order, pack)

    def _would_be_short(self, view: SchedulerView, num_seats: int) -> bool:
        if not view.waiting:
            return False
        begun = (r for r in view.running if not r.is_decode)
        tokens = sum(r.num_uncomputed_tokens for r in (*begun, *view.waiting))
        num_left = view.kv.num_free_blocks - tokens / view.kv.block_size
        is_short = num_left < self.spare * view.kv.num_blocks
        return is_short or (self.count_seats and num_seats < len(view.waiting))
