"""TensorRT-LLM's two schedulers: which requests may hold resources, and which of them run now."""

from __future__ import annotations

import heapq
import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    EndReason,
    ForeseesDecodes,
    Limits,
    Request,
    RequestStatus,
    SchedulerOutput,
    SchedulerView,
    heeding,
    tunable,
)
from slosched.policy.engines.trtllm.capacity import GuaranteedNoEvict, MaxUtilization, StaticBatch
from slosched.policy.engines.trtllm.micro_batch import ContextChunking, TokenBudget
from slosched.policy.engines.trtllm.parts import (
    ActiveRequest,
    Capacity,
    CapacityScheduler,
    MicroBatchScheduler,
    Part,
    Room,
)
from slosched.policy.kit.decode_first import decodes_until_s

__all__ = [
    "TRTLLM",
    "ActiveRequest",
    "Capacity",
    "CapacityScheduler",
    "ContextChunking",
    "GuaranteedNoEvict",
    "MaxUtilization",
    "MicroBatchScheduler",
    "Part",
    "Room",
    "StaticBatch",
    "TokenBudget",
    "WaitingQueue",
]

CAPACITY_SCHEDULERS: dict[str, Callable[[], CapacityScheduler]] = {
    "guaranteed_no_evict": GuaranteedNoEvict,
    "max_utilization": MaxUtilization,
    "static_batch": StaticBatch,
}


class WaitingQueue(StrEnum):
    """The order in which requests are taken up, and in which both schedulers see them."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    """The order of `Request.priority`, smallest first, and then of arrival."""


@dataclass
class TRTLLM(ForeseesDecodes):
    """A capacity scheduler says which requests hold KV blocks, a micro-batch scheduler which run.

    As many requests are active as there are seats, by arrival or by priority.  By default, one
    starts only if blocks for its prompt and all its `max_tokens` are free, and contexts are not
    cut: a prompt longer than a step is refused.  Either scheduler may be your own, given as
    `package.module:Class`.

    Source: TensorRT-LLM's C++ batch manager and `_torch/pyexecutor/scheduler`, and the decisions
    that its unit tests assert.  If a step would be empty, the engine would hang (with units larger
    than a step, or a paused request that has grown longer than one); here the first request that
    can run is served.

    Left out: beams, attention windows, encoders, several micro-batches in flight, and reuse counted
    as compute already done.  The two schedulers support draft tokens, and requests that wait for a
    prefix that another one computes.  But this policy passes neither to them: slosched adds drafts
    to a finished plan, in what it leaves, and with a prefix cache, requests reuse only what is
    cached when they start.
    """

    capacity_scheduler_policy: str = tunable("guaranteed_no_evict", "max_utilization")
    context_chunking_policy: ContextChunking = tunable(
        ContextChunking.NONE,
        ContextChunking.FIRST_COME_FIRST_SERVED,
        ContextChunking.EQUAL_PROGRESS,
    )
    """The way in which contexts share a step's tokens; the unit of chunks is a KV block."""
    max_context_length: float = math.inf
    """The most tokens in one chunk of a context."""
    waiting_queue_policy: WaitingQueue = heeding(
        WaitingQueue.FCFS, {WaitingQueue.PRIORITY: "priority"}
    )
    max_num_active: int = 0
    """The number of requests taken up at once; 0 for as many as there are seats."""
    micro_batch_scheduler: str = "token_budget"

    def __post_init__(self) -> None:
        if self.max_num_active < 0:
            raise ValueError(f"max_num_active must be at least 0, not {self.max_num_active}")
        if not self.max_context_length >= 1:
            raise ValueError(f"max_context_length must be >= 1, not {self.max_context_length}")
        token_budget = partial(TokenBudget, self.context_chunking_policy, self.max_context_length)
        self._capacity: CapacityScheduler = _named(
            "capacity_scheduler_policy",
            self.capacity_scheduler_policy,
            CAPACITY_SCHEDULERS,
            "schedule_request",
        )
        self._micro_batch: MicroBatchScheduler = _named(
            "micro_batch_scheduler",
            self.micro_batch_scheduler,
            {"token_budget": token_budget},
            "schedule",
        )

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        batch = BatchBuilder(view)
        active, room = _shown(self._in_order(batch, view), view)
        fitting, paused = self._capacity.schedule_request(active, room)
        for victim in paused:
            batch.preempt(victim.request)
        parts = self._micro_batch.schedule(fitting, room)
        generations = [part.active.request for part in parts if part.active.is_generation]
        batch.add_preempting(generations, victims=list(generations))
        for part in parts:
            if not part.active.is_generation:
                batch.add(part.active.request, part.num_tokens)
        if not batch.num_scheduled_tokens:
            _go_on(batch, [a.request for a in fitting], [a.request for a in active])
        return batch.build()

    def decodes_until_s(self, decodes: DecodeGroup, limits: Limits) -> float:
        """Return until when all decodes surely go on; `-math.inf` with a user's own scheduler.

        The engine's schedulers never let a generation wait while there are blocks and tokens.
        """
        if not isinstance(self._micro_batch, TokenBudget) or (
            self.capacity_scheduler_policy not in CAPACITY_SCHEDULERS
        ):
            return -math.inf
        return decodes_until_s(decodes, limits, limits.max_num_batched_tokens)

    def reset(self) -> None:
        self.__post_init__()  # a scheduler of the user's own may have state

    def _in_order(self, batch: BatchBuilder, view: SchedulerView) -> list[Request]:
        """Return the active requests: those begun or paused, then the next waiting ones."""
        by_priority = self.waiting_queue_policy == WaitingQueue.PRIORITY
        most = self.max_num_active or view.limits.max_num_seqs
        most -= len(view.running) + len(view.swapped)
        waiting: Iterable[Request] = view.waiting
        if by_priority and most > 0:
            waiting = heapq.nsmallest(most, waiting, lambda r: (not r.num_preemptions, r.priority))
        active = [*view.running, *view.swapped, *self._taken_up(batch, waiting, most)]
        active.sort(key=_by_priority if by_priority else _by_arrival)
        return active

    def _taken_up(
        self, batch: BatchBuilder, waiting: Iterable[Request], most: int
    ) -> list[Request]:
        """Return the first `most` requests; without chunking, refuse prompts that exceed a step."""
        is_cut = self.context_chunking_policy != ContextChunking.NONE
        taken: list[Request] = []
        for request in waiting:
            if len(taken) >= most and not request.num_preemptions:
                break
            if (
                is_cut
                or request.num_preemptions
                or (request.num_prompt_tokens <= batch.num_free_tokens)
            ):
                taken.append(request)
            else:
                batch.reject(request, EndReason.TOO_LONG)
        return taken


def _by_arrival(request: Request) -> float:
    return request.arrival_s


def _by_priority(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival_s


def _shown(requests: Iterable[Request], view: SchedulerView) -> tuple[list[ActiveRequest], Room]:
    """Return the requests as the schedulers see them, and the resources of the step."""
    block_size, num_held_blocks = view.kv.block_size, view.kv.num_held_blocks
    num_free_blocks, num_ready_blocks = view.kv.num_free_blocks, view.kv.ledger().num_ready_blocks
    active = []
    for request in requests:
        is_generation, held, dropped = False, 0, 0
        if request.status is RequestStatus.RUNNING:
            known = request.num_prompt_tokens + request.num_output_tokens
            held = num_held_blocks(request.request_id)
            dropped = num_ready_blocks(request.request_id) - held
            is_generation = known - request.num_computed_tokens == 1
            if not is_generation:
                missing = max(0, -(-known // block_size) - held - dropped)
                held += missing
                num_free_blocks -= missing
        active.append(ActiveRequest(request, is_generation, held, num_dropped_blocks=dropped))
    return active, Room(view, num_free_blocks)


def _go_on(batch: BatchBuilder, fitting: Sequence[Request], active: Sequence[Request]) -> None:
    """Run the first request that can run, since otherwise nothing would ever change."""
    if any(batch.add(request) for request in fitting):
        return
    running = [r for r in active if r.status is RequestStatus.RUNNING and not batch.has_left(r)]
    batch.add_preempting(running[:1], victims=running)
    if not running:
        any(batch.admit(request) for request in active)


def _named(option: str, text: str, known: dict[str, Callable[[], Any]], method: str) -> Any:
    """Return the named scheduler, or the user's own; raise ValueError if it lacks `method`."""
    if make := known.get(text):
        return make()
    module, _, name = text.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"{option}={text!r} is no scheduler ({error}); there are {', '.join(known)}, "
            f"or write your own as package.module:Class"
        ) from error
    if not callable(getattr(made, method, None)):
        raise ValueError(f"{option}={text!r} is no scheduler: it has no method {method}")
    return made
