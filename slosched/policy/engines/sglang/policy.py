"""SGLang's scheduler: prompts before decodes, admitted by what decodes are expected to want."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    EndReason,
    PlansBesideDecodes,
    Request,
    SchedulerOutput,
    SchedulerView,
    heeding,
    tunable,
)
from slosched.policy.engines.sglang.adder import AddResult, PrefillAdder, num_promised
from slosched.policy.engines.sglang.order import MAX_WAITING_FOR_PREFIXES, Order, SchedulePolicy
from slosched.policy.engines.sglang.requests import LastBatch, Queues, has_ended
from slosched.policy.engines.sglang.retract import NewTokenRatio, retract

__all__ = ["MAX_WAITING_FOR_PREFIXES", "SGLang", "SchedulePolicy"]


@dataclass
class SGLang(PlansBesideDecodes):
    """SGLang 0.5.5, decision by decision, with the names and defaults of its own options.

    A step holds either prompts or decodes: as long as prompts can start, decodes wait, unless
    `enable_mixed_chunk` is set.  A prompt starts if the KV cache has room for it, for all that it
    may emit, and for `new_token_ratio` times what running requests may emit.  The first that does
    not fit ends the search until a request finishes.  The ratio falls with every decode step.  When
    blocks run out for the decodes after all, those with the fewest output tokens are retracted:
    they lose their KV cache and wait at the end of the queue, and the ratio rises.

    Seats (`max_running_requests`) and LoRA adapters (`max_loras_per_batch`) are the host's
    `Limits`, and no chunk is larger than its step.  The host's KV cache says how much of a
    waiting prompt is cached.  If the host preempts by swap, retracted requests are swapped out.

    Source: SGLang 0.5.5 `managers/scheduler.py`, `schedule_batch.py` and `schedule_policy.py`.
    Left out: speculation, grammars, pipelines, disaggregation.  Differences, because the engine
    may neither die nor hang, nor refuse a request that has emitted tokens:

    * A prompt longer than a step is computed in chunks, even if `chunked_prefill_size` is -1.
    * SGLang never starts a request that together with its `max_tokens` would fill the whole cache;
      here it runs alone.
    * SGLang dies when a cut prompt or mixed decodes find no room; here they wait.
    * SGLang may abort retracted requests because of `max_queued_requests`; here they only count.
    """

    schedule_policy: SchedulePolicy = tunable(
        SchedulePolicy.FCFS, SchedulePolicy.LPM, SchedulePolicy.LOF
    )
    """The order in which waiting requests are tried; `lpm` and `dfs-weight` need a prefix cache.

    `hrrn` and `shortest-prefill-first` are those of SGLang 0.5.23.
    """
    max_waiting_for_prefixes: int = MAX_WAITING_FOR_PREFIXES
    """With more waiting requests, `lpm` and `hrrn` become `fcfs`; this is a constant in SGLang."""
    schedule_conservativeness: float = tunable(1.0, 0.3, 1.5)
    """Scales the share of `max_tokens` that running requests are initially expected to use."""
    max_prefill_tokens: int = 16384
    """The limit for prompt tokens of a step; the first prompt may exceed it."""
    chunked_prefill_size: int = tunable(8192, 2048, 512)
    """The most prompt tokens that a step computes; -1 for no limit but the step's."""
    enable_mixed_chunk: bool = tunable(False, True)
    """True if decodes run in the steps that compute prompts, as a part of the chunk."""
    enable_priority_scheduling: bool = heeding(False, {True: "priority"})
    """True if more urgent requests go first, and preempt others when seats run out."""
    schedule_low_priority_values_first: bool = True
    """True if lower numbers are more urgent, as in all of slosched; SGLang's default is False."""
    priority_scheduling_preemption_threshold: int = 10
    """A running request is preempted for one that is more urgent by more than this difference."""
    max_queued_requests: int = 0
    """The limit for waiting requests; 0 for none.  A newcomer beyond it is refused, or with
    priorities the least urgent request is."""

    def __post_init__(self) -> None:
        if not self.schedule_conservativeness > 0:
            raise ValueError(
                f"schedule_conservativeness must be positive, not {self.schedule_conservativeness}"
            )
        for name in ("max_prefill_tokens", "max_waiting_for_prefixes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, not {getattr(self, name)}")
        if self.chunked_prefill_size < 1 and self.chunked_prefill_size != -1:
            raise ValueError(
                f"chunked_prefill_size must be >= 1, or -1 for none, "
                f"not {self.chunked_prefill_size}"
            )
        if self.max_queued_requests < 0:
            raise ValueError(
                f"max_queued_requests must be >= 1, or 0 for no limit, "
                f"not {self.max_queued_requests}"
            )
        plain = (SchedulePolicy.FCFS, SchedulePolicy.LOF)
        if self.enable_priority_scheduling and self.schedule_policy not in plain:
            raise ValueError(
                f"enable_priority_scheduling goes with schedule_policy fcfs or lof, "
                f"not {self.schedule_policy}"
            )
        self.reset()

    def reset(self) -> None:
        self._queues = Queues()
        self._is_full = False
        """True if no prompt is tried until a request has left: SGLang's `batch_is_full`."""
        self._ratio = NewTokenRatio(self.schedule_conservativeness)
        self._order = Order(self.schedule_policy, self.max_waiting_for_prefixes)

    def schedule(self, view: SchedulerView) -> SchedulerOutput:
        if self._queues.follow(view):
            self._is_full = False
            self._ratio.reset()
        batch = BatchBuilder(view)
        if self.max_queued_requests:
            for request in self._queues.turn_away(self.max_queued_requests, view, self._rank):
                batch.reject(request, EndReason.QUEUE_FULL)
        # A turn in which nothing runs may be what lets the next turn start a prompt.
        if self._turn(batch, view) or self._queues.is_pending(view):
            return batch.build()
        self._ratio.reset()
        if not self._turn(batch, view) and not batch.num_scheduled_tokens:
            self._go_on(batch, view)
        return batch.build()

    def schedule_beside(self, decodes: DecodeGroup, view: SchedulerView) -> SchedulerOutput | None:
        """Return a plan without new prompts if SGLang would not try to start one, else None."""
        queues = self._queues
        tries = bool(view.waiting) and (self.enable_priority_scheduling or not self._is_full)
        tries |= bool(0 < self.max_queued_requests < len(view.waiting))
        if tries or view.running or queues.chunked is not None or queues.last.is_prefill:
            return None
        running = queues.running
        if len(running) != decodes.num_decodes:
            running = [request for request in running if not request.status.is_ended]
        if not len(running) == decodes.num_decodes <= view.limits.max_num_batched_tokens:
            return None
        self._ratio.decay()
        queues.adopt_newcomers(view)  # Who joins now stands before who is preempted later.
        self._goes_on_with(running, view.waiting)
        return SchedulerOutput()

    def _turn(self, batch: BatchBuilder, view: SchedulerView) -> bool:
        """Go once through SGLang's loop; return False if there is nothing to run."""
        queues = self._queues
        if queues.merge_last():
            self._is_full = False
        if self._prefill(batch, view):
            return True
        return bool(queues.running) and self._decode(batch, view)

    def _prefill(self, batch: BatchBuilder, view: SchedulerView) -> bool:
        queues, limits = self._queues, view.limits
        if self.enable_priority_scheduling:
            self._is_full = False
        if (self._is_full or not queues.waiting) and queues.chunked is None:
            return False
        max_running_requests = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        num_free = max_running_requests - len(queues.running)
        if num_free <= 0 and queues.chunked is None and not self.enable_priority_scheduling:
            self._is_full = True
            return False
        self._sort(queues.waiting)
        adder = self._make_adder(batch, view)
        chunked, queues.chunked = queues.chunked, None
        if chunked is not None:
            limit = self._order.chunk_limit(
                chunked, queues.waiting, adder.chunk_left, view.kv.block_size
            )
            if not adder.add_chunked(chunked, limit):
                queues.chunked = chunked
        num_before = len(adder.admitted)
        victims = self._admit(adder, view, max_running_requests)
        # admission stops at the first request that does not fit
        del queues.waiting[: len(adder.admitted) - num_before]
        self._order.leave(adder.admitted)
        queues.waiting += victims
        if not adder.admitted:
            return False
        if adder.new_chunked is not None:
            queues.cut(adder.new_chunked)
        decodes = self._mix(batch) if self._mixes else []
        num_tokens = sum(batch.num_scheduled_tokens[r.request_id] for r in adder.admitted)
        num_tokens += len(decodes)
        self._order.num_prefilled += num_tokens
        queues.last = LastBatch([*adder.admitted, *decodes], True, queues.chunked, num_tokens)
        return True

    def _sort(self, waiting: list[Request]) -> None:
        urgency = self._urgency if self.enable_priority_scheduling else None
        self._order.follow(waiting)
        self._order.sort(waiting, urgency)

    @property
    def _mixes(self) -> bool:
        return self.enable_mixed_chunk and self.chunked_prefill_size > 0

    def _make_adder(self, batch: BatchBuilder, view: SchedulerView) -> PrefillAdder:
        chunk_tokens = view.limits.max_num_batched_tokens
        if self.chunked_prefill_size > 0:
            chunk_tokens = min(chunk_tokens, self.chunked_prefill_size)
        running = self._queues.running
        return PrefillAdder(
            batch,
            view,
            running,
            new_token_ratio=self._ratio.value,
            max_prefill_tokens=self.max_prefill_tokens,
            chunk_tokens=chunk_tokens,
            num_mixed=len(running) if self._mixes else 0,
        )

    def _admit(
        self, adder: PrefillAdder, view: SchedulerView, max_running_requests: int
    ) -> list[Request]:
        """Try waiting requests in order until one does not fit; return those preempted for them."""
        queues, victims = self._queues, list[Request]()
        max_loras = view.limits.max_loras
        loras = {r.lora_id for r in (*queues.running, *adder.admitted)}
        for request in queues.waiting:
            loras.add(request.lora_id)
            if max_loras is not None and len(loras) > max_loras:
                self._is_full = True
                break
            if len(adder.admitted) >= max_running_requests - len(queues.running):
                self._is_full = True
            if self._is_full:
                driven_out = self._drive_out_for(request, adder)
                victims += driven_out
                if not driven_out:
                    break
            queues.tried.add(request.request_id)
            result = adder.add(request)
            if result is not AddResult.CONTINUE:
                self._is_full |= result is AddResult.NO_TOKEN
                break
        queues.tried.difference_update(r.request_id for r in (*adder.admitted, *victims))
        return victims

    def _drive_out_for(self, request: Request, adder: PrefillAdder) -> list[Request]:
        """Preempt all running requests that are sufficiently less urgent, if `request` then fits.

        Returns the preempted requests.  SGLang counts the prompt only if it has tried the request
        before.
        """
        if not self.enable_priority_scheduling:
            return []
        queues, threshold = self._queues, self.priority_scheduling_preemption_threshold
        urgency = self._urgency(request)
        victims = [
            r
            for r in queues.running
            if urgency - self._urgency(r) > threshold and r.request_id in queues.present
        ]
        was_tried = request.request_id in queues.tried
        wanted = num_promised(request) + was_tried * request.num_uncomputed_tokens
        if not adder.would_hold(wanted, victims):
            return []
        adder.release(victims, request)
        queues.running = [r for r in queues.running if r not in victims]
        return victims

    def _rank(self, request: Request) -> int:
        return self._urgency(request) if self.enable_priority_scheduling else 0

    def _urgency(self, request: Request) -> int:
        sign = -1 if self.schedule_low_priority_values_first else 1
        return sign * request.priority

    def _mix(self, batch: BatchBuilder) -> list[Request]:
        """Add the decodes to a step with prompts; those for which there is no room run later."""
        mixed, left = list[Request](), list[Request]()
        queues = self._queues
        for request in queues.running:
            if not has_ended(request):
                is_in = request.request_id not in queues.present or batch.add(request)
                (mixed if is_in else left).append(request)
        queues.running = left
        return mixed

    def _decode(self, batch: BatchBuilder, view: SchedulerView) -> bool:
        """Give each decode one token; if there is no room for that, retract some first."""
        queues, block_size = self._queues, view.kv.block_size
        running = [request for request in queues.running if not has_ended(request)]

        def has_room_for(requests: Sequence[Request]) -> bool:
            num_new = sum(1 for r in requests if not r.num_computed_tokens % block_size)
            return num_new <= batch.num_free_blocks

        if running and has_room_for(running):
            self._ratio.decay()
        elif running:
            running = retract(running, has_room_for, partial(self._release, batch))
            self._ratio.learn_from(running)
        self._goes_on_with(running, queues.waiting)
        present = [request for request in running if request.request_id in queues.present]
        batch.add_preempting(present, victims=list(present))
        return bool(running)

    def _release(self, batch: BatchBuilder, victim: Request) -> None:
        """Preempt the request and queue it last; one whose last token is on its way just ends."""
        if victim.request_id in self._queues.present:
            batch.preempt(victim)
            self._queues.waiting.append(victim)

    def _goes_on_with(self, running: list[Request], waiting: Sequence[Request]) -> None:
        """Set the decodes of this step; if some of the last step's have left, there may be room."""
        queues = self._queues
        self._order.follow(waiting)
        # SGLang counts a batch of decodes with the tokens of the prefill step that the batch once
        # was.
        self._order.num_prefilled += queues.num_founding_tokens if running else 0
        self._is_full &= len(running) == len(queues.running)
        queues.running, queues.last = running, LastBatch(running)

    def _go_on(self, batch: BatchBuilder, view: SchedulerView) -> None:
        """Run at least one request where SGLang would hang."""
        running = [request for request in view.running if not batch.has_left(request)]
        batch.add_preempting(running[:1], victims=running)
        if not running:
            waiting = (*view.swapped, *view.waiting)
            any(batch.add(request) for request in waiting)
