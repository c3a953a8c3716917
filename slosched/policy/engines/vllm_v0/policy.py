"""vLLM's first scheduler, V0: whole prompts before decodes, or chunks after them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

from slosched.core import (
    DecodeGroup,
    Limits,
    PlansBesideDecodes,
    Request,
    SchedulerOutput,
    SchedulerView,
    heeding,
    tunable,
)
from slosched.policy.engines.vllm_v0.blocks import AllocStatus, BlockManager, BlockTable
from slosched.policy.engines.vllm_v0.step import Step


class SchedulingPolicy(StrEnum):
    """The order in which requests are more urgent."""

    FCFS = "fcfs"
    PRIORITY = "priority"


@dataclass
class VLLMV0(PlansBesideDecodes):
    """vLLM 0.6.3, decision by decision, with the names and defaults of its own options.

    By default a step holds either prompts or decodes.  Prompts come first: as many whole ones, in
    order of arrival, as tokens, seats and blocks allow, unless a request is swapped out.  If none
    starts, the decodes run, and behind them those swapped in.  With `enable_chunked_prefill`,
    running requests go first (prompts in chunks), then those swapped in, then new prompts, even if
    a request was preempted.  When blocks run out, the last running request is preempted.  A decode
    needs a free block for its token even if its last block has room.

    Tokens, seats, LoRA adapters and the mode of preemption are the host's `Limits`. vLLM requires
    that a step hold `max_num_seqs` tokens and, unless it chunks, a prompt of `max_model_len`.  If
    that limit is not set, a longer prompt is computed in parts here, each in a step of its own.

    With the KV cache that is V0's own (`--prefix-cache merged`), requests of equal content allocate
    its blocks once.  Cached tokens still count against the step's tokens, and chunks are whole
    blocks.  A chunk that is fully cached recomputes a single token, for its place in the step.

    Several answers to one prompt are preempted together, and always by swap, as long as more than
    one of them has not ended and the host has room.

    Source: vLLM 0.6.3 `core/scheduler.py`, `core/block_manager_v2.py`.
    Left out: several steps in one (`num_scheduler_steps`), encoders, and the asynchronous output
    processor.  Differences, because a request that has emitted tokens is never dropped and the
    engine never dies or hangs:

    * vLLM drops a preempted request that has outgrown the longest prompt or the watermark.  Here it
      is computed in parts, and may go below the watermark.
    * vLLM dies when host memory is full, and when a swapped request's lookahead slots find no
      blocks.  Here the victim is recomputed, and the swapped request comes back without those
      slots.
    * vLLM waits forever for a swapped request that needs more than the cache's blocks above the
      watermark, or more than a step's tokens.  Here it comes back when no other request is in its
      way.
    * vLLM begins a chunked prompt again and again if it fills the whole cache up to a part of its
      last block, for lack of a free one that it does not need.  Here it goes on.
    * If blocks become equal while a step is planned, vLLM gives the room to the next request in the
      same step.  Here the room is there in the next step, and a request may have to skip a step for
      it.
    * vLLM shares blocks in host memory, too, and marks a begun prompt's blocks as computed before
      they are.  Here a victim has a copy of its own, and no request builds on blocks that are not
      computed.
    * With `priority` and preemption by swap, vLLM breaks after a forced preemption, whose mode it
      ignores.  Here such a victim is recomputed, as its code asks.
    """

    enable_chunked_prefill: bool = tunable(False, True)
    policy: SchedulingPolicy = heeding(
        SchedulingPolicy.FCFS, {SchedulingPolicy.PRIORITY: "priority"}
    )
    """With `priority`, lower numbers, then earlier arrivals, preempt others; not when chunked."""
    delay_factor: float = tunable(0.0, 0.5, 1.0)
    """Prompts wait until the first has waited this many times the last prompt step's time."""
    watermark: float = 0.01
    """The share of the KV blocks that admitting a prompt or swapping in leaves free."""
    num_lookahead_slots: int = 0
    """KV slots that every decode holds beyond its tokens, for speculation."""
    max_model_len: int = 0
    """The longest prompt in tokens, and without chunks at most a step's; 0 for no limit."""

    def __post_init__(self) -> None:
        for name in ("delay_factor", "watermark", "num_lookahead_slots", "max_model_len"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        self.reset()

    def reset(self) -> None:
        self._tables: dict[str, BlockTable] = {}
        self._running: list[str] = []
        """Running requests in vLLM's order, which differs from the admission order with chunks."""
        self._waiting: list[str] = []
        """Waiting requests in vLLM's order after the last step; used only with `priority`."""
        self._is_recomputing = False
        """True if what looks like a decode may, to vLLM, be the end of a recomputed prompt."""
        self._delay = _PromptDelay(self.delay_factor)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        _check_supported(view.limits)
        waiting = _in_order_of(self._waiting, view.waiting) if self._waiting else view.waiting
        admitted = _in_order_of(self._running, view.running)
        step = Step(view, admitted, waiting, self._blocks(view, self._tables))
        if self.enable_chunked_prefill:
            running = self._chunked(step, view)
        else:
            running = self._default(step, view)
        self._running = [r.request_id for r in chain(step.running, *running, step.prefills)]
        if self.policy is SchedulingPolicy.PRIORITY:
            step.waiting.extendleft(step.victims)
            self._waiting = [r.request_id for r in step.waiting]
        return self._planned(step)

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Return a plan while decodes come first, none of them is preempted, and blocks abound.

        The tables of these decodes equal what the KV cache holds for them, so none are kept.
        """
        if (
            self._is_recomputing
            or self.num_lookahead_slots
            or self.delay_factor
            or self.policy is SchedulingPolicy.PRIORITY
        ):
            return None
        if self.enable_chunked_prefill:
            return self._chunked_beside(decodes, view)
        return self._decodes_only(decodes, view)

    def _decodes_only(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Return an empty plan if no prompt runs in this step and none is refused."""
        blocks = self._blocks(view, self._tables)
        head = next(iter(view.waiting), None)
        if (
            view.running
            or (head is not None and not self._has_to_wait(head, decodes, view, blocks))
            or decodes.num_decodes > view.limits.max_num_batched_tokens
            or decodes.num_new_blocks >= blocks.num_free_blocks
        ):
            return None
        return SchedulerOutput()

    def _has_to_wait(
        self, head: Request, decodes: DecodeGroup, view: SchedulerView, blocks: BlockManager
    ) -> bool:
        if blocks.num_left(head) > self._prompt_limit(view):
            return False
        status, has_seat = blocks.can_allocate(head), decodes.num_decodes < view.limits.max_num_seqs
        return status is AllocStatus.LATER or (status is AllocStatus.OK and not has_seat)

    def _chunked_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Return a plan if all begun prompts stand behind the decodes and none is preempted."""
        num_before = len(self._running) - len(view.running)
        before, behind = self._running[:num_before], self._running[num_before:]
        others = _in_order_of(behind, view.running)
        if [r.request_id for r in others] != behind:
            return None
        # These are copies, because `schedule` plans the same requests again if this plan is
        # dropped.
        booked = {request_id: replace(table) for request_id, table in self._tables.items()}
        step = Step(view, others, view.waiting, self._blocks(view, booked), decodes)
        if not step.has_room_to_spare:
            return None
        step.schedule_running()
        if step.victims:
            return None
        running = self._behind_running(step, view)
        started = [r.request_id for r in chain(*running, step.prefills)]
        self._running = [*(r.request_id for r in step.running), *before, *started]
        return self._planned(step)

    def _planned(self, step: Step) -> SchedulerOutput:
        self._is_recomputing = step.is_recomputing
        self._tables = step.blocks.tables
        return step.build()

    def _blocks(self, view: SchedulerView, tables: Mapping[str, BlockTable]) -> BlockManager:
        return BlockManager(
            view,
            tables,
            watermark=self.watermark,
            num_lookahead_slots=self.num_lookahead_slots,
        )

    def _default(self, step: Step, view: SchedulerView) -> tuple[list[Request], ...]:
        """Plan prompts or decodes; return the step's running ones, in their next order."""
        step.count_loras(step.running)
        if begun := next(filter(step.blocks.is_prefill, step.running), None):
            step.resume(begun)
        elif not step.swapped:
            self._prefill(step, view)
        if not (step.prefills or begun):
            if self.policy is SchedulingPolicy.PRIORITY:
                step.preempt_for_priority(_urgency)
            step.schedule_running()
            if not step.victims:
                step.schedule_swapped()
        return step.running_prefills, step.running_decodes, step.swapped_decodes

    def _chunked(self, step: Step, view: SchedulerView) -> tuple[list[Request], ...]:
        """Plan everything in one step; return its running ones, in their next order."""
        step.schedule_running()
        return self._behind_running(step, view)

    def _behind_running(self, step: Step, view: SchedulerView) -> tuple[list[Request], ...]:
        if not step.victims:
            step.schedule_swapped()
        self._prefill(step, view)
        return (
            step.swapped_decodes,
            step.swapped_prefills,
            step.running_decodes,
            step.running_prefills,
        )

    def _prefill(self, step: Step, view: SchedulerView) -> None:
        step.schedule_prefills(
            enable_chunking=self.enable_chunked_prefill,
            prompt_limit=self._prompt_limit(view),
            may_go_on=lambda step: self._delay.has_passed(view, step),
        )
        self._delay.was_prompt = bool(step.prefills)

    def _prompt_limit(self, view: SchedulerView) -> float:
        limit = self.max_model_len or math.inf
        if self.max_model_len and not self.enable_chunked_prefill:
            limit = min(limit, view.limits.max_num_batched_tokens)
        return limit


class _PromptDelay:
    """Holds prompts back for a multiple of the time that the last step with new prompts took."""

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_prompt_latency_s = 0.0
        self._before_s = 0.0
        """The time of the last call, in this step or the one before."""
        self.was_prompt = False

    def has_passed(self, view: SchedulerView, step: Step) -> bool:
        now_s = view.now_s
        if self.was_prompt and not view.follows_another:
            self._last_prompt_latency_s = now_s - self._before_s
        self._before_s, self.was_prompt = now_s, False
        if not self._factor or not step.waiting or not step.running:
            return True
        waited_s = now_s - min(request.arrival_s for request in step.waiting)
        return waited_s > self._factor * self._last_prompt_latency_s


def _check_supported(limits: Limits) -> None:
    """Raise ValueError for limits that vLLM V0 did not have, or had as options of its own."""
    if limits.max_chunk_tokens is not None or limits.num_watermark_blocks:
        raise ValueError(
            "vllm_v0 plans by its own watermark and cuts chunks by the step's tokens alone: leave "
            "out --watermark and --long-prefill-token-threshold (vllm_v0:watermark=0.05 is its own)"
        )


def _urgency(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_s


def _in_order_of(names: list[str], requests: Iterable[Request]) -> list[Request]:
    """Return the requests in the order of `names`, and behind them those that are not named."""
    by_name = {request.request_id: request for request in requests}
    named = [by_name.pop(name) for name in names if name in by_name]
    return [*named, *by_name.values()]
