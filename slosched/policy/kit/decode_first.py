"""Stall-free packing, shared by the policies that differ only in the order of prefills."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    ForeseesDecodes,
    Limits,
    PlansBesideDecodes,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    tunable,
)
from slosched.policy.kit.drop import Drop, drop_late


def check_token_budget(token_budget: int) -> None:
    if token_budget < 1:
        raise ValueError(f"token_budget must be at least 1, not {token_budget}")


@dataclass
class DecodeFirst(PlansBesideDecodes, ForeseesDecodes):
    """One token for every decode, then prefill chunks until the token budget is full.

    Swapped requests come back before new ones start, and none starts in a step that had to
    preempt.  A prompt is begun only if all of it fits into the KV cache beside those already
    begun.  Source: Sarathi-Serve (OSDI '24), algorithm 3.
    """

    token_budget: int = tunable(512, 128, 256, 1024, 2048)
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)

    def __post_init__(self) -> None:
        check_token_budget(self.token_budget)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view, token_budget=self.token_budget)
        view = drop_late(batch, view, self.drop)
        begun, waiting = add_decodes(batch, view)
        prefills = self._in_order(begun, waiting)
        add_prefills(batch, prefills, reserved_blocks=batch.blocks_promised(begun))
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """If the budget has a token for each of the decodes."""
        batch = BatchBuilder(view, beside=decodes, token_budget=self.token_budget)
        if batch.num_free_tokens < 0:
            return None
        view = drop_late(batch, view, self.drop)
        prefills = self._in_order(view.running, view.waiting)
        add_prefills(batch, prefills, reserved_blocks=batch.blocks_promised(view.running))
        return batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        return decodes_until_s(decodes, limits, self.token_budget)

    def prefill_order(self) -> Callable[[Request], float] | None:
        """What is least first.  None: prompts that have begun, then by arrival."""
        return None

    def _in_order(self, begun: Iterable[Request], waiting: Iterable[Request]) -> Iterable[Request]:
        prefills, order = chain(begun, waiting), self.prefill_order()
        return prefills if order is None else sorted(prefills, key=order)


def add_decodes(
    batch: BatchBuilder, view: SchedulerView
) -> tuple[list[Request], Sequence[Request]]:
    """One token for every decode; the prompts that have begun, and those that may start.

    None may start in a step that had to preempt, or before all swapped requests are back.
    """
    running = view.running
    begun = [r for r in running if not r.is_decode]
    decodes = [r for r in running if r.is_decode] if begun else running
    batch.add_preempting(decodes, victims=list(running))
    waiting = view.waiting if may_start_new(batch, view, begun) else ()
    return [r for r in begun if not batch.has_left(r)], waiting


def decodes_until_s(decodes: DecodeGroup, limits: Limits, token_budget: int) -> float:
    """For ever, if the budget has a token for each of them: no clock is in this."""
    budget = min(token_budget, limits.max_num_batched_tokens)
    return math.inf if decodes.num_decodes <= budget else -math.inf


def add_prefills(batch: BatchBuilder, prefills: Iterable[Request], reserved_blocks: int) -> None:
    """In order; the first waiting request that cannot start keeps those behind it out, too."""
    blocked = False
    for request in prefills:
        if batch.num_free_tokens <= 0:
            break
        if request.status is RequestStatus.RUNNING:
            num_free_blocks = batch.num_free_blocks
            batch.add(request)
            if not request.is_decode:  # it takes of what is promised to it
                reserved_blocks -= num_free_blocks - batch.num_free_blocks
        elif blocked or not (n := batch.admit(request, reserved_blocks=reserved_blocks)):
            blocked = True
        elif n < request.num_uncomputed_tokens:
            reserved_blocks += batch.blocks_promised((request,))


def may_start_new(batch: BatchBuilder, view: SchedulerView, begun: list[Request]) -> bool:
    """Bring swapped requests back; True if all of them came and nothing had to be preempted."""
    if batch.preempted or batch.swapped_out:
        return False
    reserved = batch.blocks_promised(begun)
    return all(batch.admit(request, reserved_blocks=reserved) for request in view.swapped)
