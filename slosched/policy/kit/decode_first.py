"""Steps without stalls: every decode gets its token, then prefill chunks fill the step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

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
from slosched.policy.kit.checks import check_at_least
from slosched.policy.kit.drop import Drop, drop_late
from slosched.policy.kit.make_way import has_to_make_way, with_way_made


class StallFree(PlansBesideDecodes):
    """A policy whose steps hold one token of every decode, and then prefill chunks.

    A subclass is a dataclass with a field `drop`, and writes `add_prompts`.  Swapped requests come
    back before new ones start, and no prompt starts in a step that had to preempt.
    """

    drop: Drop

    makes_way: ClassVar[bool] = False
    """Whether what can wait is preempted for prompts that are due soon (kit/make_way.py)."""

    @abstractmethod
    def add_prompts(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        begun: Sequence[Request],
        waiting: Sequence[Request],
        beside: DecodeGroup | None,
    ) -> None:
        """Add prefill chunks to a step that holds the decodes already.

        `begun` are the prompts that have begun, `waiting` those that may start in this step.  The
        decodes are either in `view.running`, or all of them are in the group `beside`.
        """

    def new_batch(self, view: SchedulerView, beside: DecodeGroup | None = None) -> BatchBuilder:
        """Return the empty step that `schedule` and `schedule_beside` fill."""
        return BatchBuilder(view, beside=beside)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = self.new_batch(view)
        view = drop_late(batch, view, self.drop)
        if self.makes_way:
            view = with_way_made(batch, view)
        begun, waiting = add_decodes(batch, view, num_made_way=len(batch.preempted))
        self.add_prompts(batch, view, begun, waiting, None)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Plan all but the decodes; return None if the step lacks a token for one of them."""
        batch = self.new_batch(view, decodes)
        if batch.num_free_tokens < 0:
            return None
        view = drop_late(batch, view, self.drop)
        if self.makes_way and has_to_make_way(batch, decodes, view):
            return None
        self.add_prompts(batch, view, view.running, view.waiting, decodes)
        return batch.build()


@dataclass
class DecodeFirst(StallFree, ForeseesDecodes):
    """One token of every decode, then prefill chunks until the token budget is full.

    A subclass that wants another order of the prefills writes `prefill_order`.  A prompt starts
    only if all of it fits into the KV cache next to those that have begun, and the first that does
    not fit keeps those behind it out; one that only lacks a LoRA slot does not.  Source:
    Sarathi-Serve (OSDI '24), algorithm 3.
    """

    token_budget: int = tunable(512, 128, 256, 1024, 2048)
    """Tokens in one step; `max_num_batched_tokens` may limit it further."""
    drop: Drop = tunable(Drop.NEVER, Drop.EXPIRED, Drop.INFEASIBLE)
    """Option that rejects requests which cannot meet their TTFT any more."""

    def __post_init__(self) -> None:
        check_at_least(1, token_budget=self.token_budget)

    def prefill_order(self, view: SchedulerView) -> Callable[[Request], float] | None:
        """Return what a prefill is sorted by, the least first.

        `view.now_s` is the time and `view.model` predicts.  Default: None, which leaves prompts
        that have begun in front of those that wait, and both in order of arrival.
        """
        return None

    def new_batch(self, view: SchedulerView, beside: DecodeGroup | None = None) -> BatchBuilder:
        return BatchBuilder(view, beside=beside, token_budget=self.token_budget)

    def add_prompts(
        self,
        batch: BatchBuilder,
        view: SchedulerView,
        begun: Sequence[Request],
        waiting: Sequence[Request],
        beside: DecodeGroup | None,
    ) -> None:
        prefills: Iterable[Request] = chain(begun, waiting)
        if (order := self.prefill_order(view)) is not None:
            prefills = sorted(prefills, key=order)
        add_prefills(batch, prefills, reserved_blocks=batch.blocks_promised(begun))

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        return decodes_until_s(decodes, limits, self.token_budget)


def split_running(running: Sequence[Request]) -> tuple[Sequence[Request], list[Request]]:
    """Return the decodes among running requests, and the prompts that have begun, in order."""
    decodes = [  # hundreds, for which calling `is_decode` would take its time
        r for r in running if r.num_prompt_tokens + r.num_output_tokens - r.num_computed_tokens == 1
    ]
    if len(decodes) == len(running):
        return decodes, []
    return decodes, [request for request in running if not request.is_decode]


def add_decodes(
    batch: BatchBuilder, view: SchedulerView, num_made_way: int = 0
) -> tuple[list[Request], Sequence[Request]]:
    """Add one token of every decode; return the prompts that have begun, and those that may start.

    No prompt may start in a step that had to preempt for decodes, or before all swapped requests
    are back.  `num_made_way` were preempted for prompts before.
    """
    running = view.running
    decodes, begun = split_running(running)
    batch.add_preempting(decodes, victims=list(running))
    waiting = view.waiting if may_start_new(batch, view, begun, num_made_way) else ()
    return [r for r in begun if not batch.has_left(r)], waiting


def decodes_until_s(decodes: DecodeGroup, limits: Limits, token_budget: int) -> float:
    """Return infinity if the budget has a token for every decode, else minus infinity.

    This answers `ForeseesDecodes` for a policy that gives every decode a token at any time.
    """
    budget = min(token_budget, limits.max_num_batched_tokens)
    return math.inf if decodes.num_decodes <= budget else -math.inf


def add_prefills(batch: BatchBuilder, prefills: Iterable[Request], reserved_blocks: int) -> None:
    """Add prefills in this order until the step is full.

    `reserved_blocks` are KV blocks kept for prompts that have begun (`blocks_promised`).  The first
    waiting request that cannot start keeps the waiting requests behind it out, too.  One that lacks
    a LoRA slot is passed over, as in vLLM.
    """
    blocked = False
    for request in prefills:
        if batch.num_free_tokens <= 0:
            break
        if not batch.has_lora_slot(request):
            continue
        if request.status is RequestStatus.RUNNING:
            num_free_blocks = batch.num_free_blocks
            batch.add(request)
            if not request.is_decode:  # its blocks come out of those reserved for it
                reserved_blocks -= num_free_blocks - batch.num_free_blocks
        elif blocked or not (n := batch.admit(request, reserved_blocks=reserved_blocks)):
            blocked = True
        elif n < request.num_uncomputed_tokens:
            reserved_blocks += batch.blocks_promised((request,))


def may_start_new(
    batch: BatchBuilder, view: SchedulerView, begun: list[Request], num_made_way: int = 0
) -> bool:
    """Bring swapped requests back; tell whether new ones may start.

    They may if nothing but the `num_made_way` that made way for them had to be preempted, and all
    swapped requests are back.  `begun` are the running prompts whose KV blocks must stay free.
    """
    if len(batch.preempted) + len(batch.swapped_out) > num_made_way:
        return False
    reserved = batch.blocks_promised(begun)
    return all(batch.admit(request, reserved_blocks=reserved) for request in view.swapped)
