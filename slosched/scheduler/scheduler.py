"""The Scheduler owns the queues and the KV block tables; the policy makes every decision.

`schedule` shows the policy a view, checks its plan against the limits, and only then carries it
out: it changes queues, block tables and progress.  `update` records what the executor produced.  A
plan that breaks a limit raises IllegalPlanError and changes nothing.  The Scheduler reads no clock:
the time is handed to it.

While a step runs the next one can be planned, after `foresee`.  Steps run in the order in which
they were planned.  So the blocks that a request leaves, even in the middle of a step, go to steps
that run after it, and a request in a running step may be preempted, rejected or aborted like any
other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from slosched.core import (
    DecodeGroup,
    Doorkeeper,
    EndReason,
    LatencyModel,
    Limits,
    PlansBesideDecodes,
    Policy,
    Refusal,
    Request,
    RequestStatus,
    ScheduledBatch,
    SchedulerView,
    StepResult,
)
from slosched.kv import KVCache
from slosched.scheduler.carry_out import CarryOut
from slosched.scheduler.groups import Groups
from slosched.scheduler.infeasible import eased_slo
from slosched.scheduler.lifecycle import Lifecycle
from slosched.scheduler.plan_check import PlanCheck
from slosched.scheduler.queues import InOrder, Queues
from slosched.scheduler.record import Recorder
from slosched.scheduler.speculation import Speculation


class Scheduler:
    """The waiting, running and swapped requests of one replica, and the blocks they hold."""

    def __init__(
        self,
        policy: Policy,
        kv: KVCache,
        limits: Limits | None = None,
        latency_model: LatencyModel | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.limits = limits or Limits()
        self.latency_model = latency_model
        self.speculation = speculation
        """What adds draft tokens to plans; None without speculative decoding."""
        self.queues = Queues()
        """Queues for others to read; only the Scheduler changes them."""
        self._check = PlanCheck(self.queues, kv, self.limits, type(policy).__name__)
        self._groups = Groups(kv)
        self._lifecycle = Lifecycle(self.queues, kv, self.limits, self._groups, speculation)
        queues, lifecycle = self.queues, self._lifecycle
        self._carry_out = CarryOut(queues, kv, self._groups, lifecycle, latency_model)
        self._recorder = Recorder(queues, kv, self.limits, lifecycle, speculation)

    @property
    def num_waiting(self) -> int:
        return len(self.queues.waiting)

    @property
    def num_running(self) -> int:
        return len(self.queues.running)

    @property
    def num_swapped(self) -> int:
        return len(self.queues.swapped)

    @property
    def num_unfinished(self) -> int:
        return len(self.queues)

    def unfinished(self) -> list[Request]:
        """Return all requests that have not ended, the running ones first."""
        queues = self.queues
        by_queue = (queues.running, queues.finishing, queues.swapped, queues.waiting, queues.held)
        return [request for queue in by_queue for request in queue.values()]

    def find(self, request_id: str) -> Request | None:
        """Return the unfinished request of this id, or None."""
        return self.queues.find(request_id)

    def add_request(self, request: Request) -> None:
        """Queue a new request, or reject it at once.

        It is rejected if the KV cache can never hold it, or if the policy refuses it on arrival.
        Raise ValueError if it is not new or if another request has its id.
        """
        self.queue(request, self.judge(request))

    def judge(self, request: Request) -> Refusal | None:
        """Return why the policy refuses a request that arrives, or None.

        With a prefix cache the answer is None: only the next plan knows what is cached of it.  Any
        thread may ask, but only once for each request.
        """
        policy, model = self.policy, self.latency_model
        if not isinstance(policy, Doorkeeper) or model is None or self.kv.caches_prefixes:
            return None
        return policy.judge(request, model, self.limits.deadline_rule)

    def queue(self, request: Request, refusal: Refusal | None = None) -> None:
        """Queue a new request that was judged, or reject it at once.

        A refused request that is to be served all the same is queued with an eased SLO.  With the
        first request of a group come all of its siblings.
        """
        if request.group is None:
            self._queue(request, refusal)
            return
        if request is not request.group.members[0]:
            raise ValueError(
                f"request {request.request_id!r} is queued with the first of its group, "
                f"{request.group.group_id!r}, not by itself"
            )
        for member in request.group.members:
            self._queue(member, refusal)

    def _queue(self, request: Request, refusal: Refusal | None) -> None:
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"request {request.request_id!r} is not new: it is {request.status}")
        if self.find(request.request_id) is not None:
            raise ValueError(f"a request with the id {request.request_id!r} is already queued")
        eased = None if refusal is None else eased_slo(request, refusal.reason)
        if eased is not None:
            request.asked_slo, request.slo = request.slo, eased
        request.deadline_s = self.limits.deadline_rule.next_deadline_s(request)
        is_held = request.group is not None and self._groups.add(request)
        if is_held:
            self.queues.held[request.request_id] = request
        else:
            self.queues.put_last(request)
        if not self.kv.fits_alone(request.num_prompt_tokens + request.max_tokens):
            self._lifecycle.end(request, EndReason.TOO_LONG, now_s=request.arrival_s)
        elif refusal is not None and eased is None:
            self._lifecycle.end(request, refusal.reason, now_s=request.arrival_s)
        elif not is_held:
            self.kv.prefixes.watch(request)

    def take_over(self, request: Request) -> bool:
        """Let a request that has emitted tokens elsewhere run on here, with KV blocks for them.

        Blocks that were reserved under its id are used.  Returns False and does nothing if it has
        emitted none, or if seats or blocks are short.
        """
        num_tokens = request.num_tokens - 1  # the last one has yet to be computed
        blocks_needed = -(-num_tokens // self.kv.block_size)
        blocks_needed -= self.kv.num_held_blocks(request.request_id)
        has_room = self.num_running < self.limits.max_num_seqs and (
            blocks_needed <= self.kv.num_free_blocks
        )
        if not request.num_output_tokens or not has_room:
            return False
        self.kv.grow(request.request_id, num_tokens)
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, num_tokens
        if request.started_s is None:
            request.started_s = request.arrival_s
        request.deadline_s = self.limits.deadline_rule.next_deadline_s(request)
        self.queues.running[request.request_id] = request
        return True

    def hand_over(self, request: Request) -> None:
        """Let a running request leave, which runs on elsewhere; the counterpart of `take_over`.

        It keeps its KV blocks here, since they are yet to be copied: `kv.forget` frees them.  No
        step may be running.
        """
        del self.queues.running[request.request_id]
        if self.speculation is not None:
            self.speculation.forget(request.request_id)

    def end(self, request_id: str, reason: EndReason, now_s: float) -> bool:
        """End a request from outside; return False if there is no unfinished request of this id.

        Reasons are that the client went away, the device failed, the server stops, or the text of
        the request is complete.
        """
        if reason.status is RequestStatus.REJECTED:
            raise ValueError(f"only a policy's plan rejects: {request_id!r} cannot end as {reason}")
        request = self.find(request_id)
        if request is None:
            return False
        self._lifecycle.end(request, reason, now_s)
        return True

    def retract_all(self) -> int:
        """Return all running and swapped requests to the queue, to be computed anew.

        They keep the tokens that they have emitted.  Returns how many they are.  No step may run
        meanwhile.
        """
        running, swapped = self.queues.running, self.queues.swapped
        running.update(swapped)
        swapped.clear()
        retracted = list(running)
        self._lifecycle.preempt(reversed(retracted))
        return len(retracted)

    def take_ended(self) -> list[Request]:
        """Return the requests that ended since the last call, each exactly once."""
        return self._lifecycle.take_ended()

    def view(self, now_s: float) -> SchedulerView:
        return self._view_of(self.queues.running.values(), now_s)

    def schedule(self, now_s: float, begins_s: float | None = None) -> ScheduledBatch:
        """Ask the policy, carry out its answer, and return what the executor has to run.

        While another step runs, which was foreseen, `begins_s` is the time at which this one may
        begin.
        """
        if self._groups:
            self._end_with_their_groups(now_s)
        if self.kv.window_tokens is not None:
            for request_id, request in self.queues.running.items():
                self.kv.drop_unseen(request_id, request.num_computed_tokens)
        view = self.view(now_s if begins_s is None else begins_s)
        output = self.policy.schedule(view)
        spare = self._check(output)
        if self.speculation is not None:
            running = self.queues.running
            output = self.speculation.with_drafts(output, view, self.policy, running, spare)
        return self._carry_out(output, now_s, started_s=now_s if begins_s is None else None)

    @property
    def can_plan_ahead(self) -> bool:
        """Tell whether the next step may be planned before the tokens of the last one are known."""
        return self.speculation is None or not self.speculation.must_wait

    def begin(self, batch: ScheduledBatch, now_s: float) -> None:
        """Note that a step that was planned while another one ran begins now."""
        self._recorder.begin(batch, now_s)

    def foresee(self, batch: ScheduledBatch, ends_s: float) -> None:
        """Count a running step, until its `update`, as if it had emitted its tokens at `ends_s`.

        A request that will then have reached its output limit has nothing left to plan.  It cannot
        be foreseen that the model ends a request; then its part of the next step is wasted.
        """
        self._recorder.foresee(batch, ends_s)

    def schedule_beside(
        self,
        policy: PlansBesideDecodes,
        decodes: DecodeGroup,
        others: Iterable[Request],
        now_s: float,
    ) -> ScheduledBatch | None:
        """Return the batch of a step that also serves the running `decodes`, or None.

        `policy` is this scheduler's own; the caller has seen that it can plan beside a group.
        `others` are the remaining running requests.  The batch has the shape of the whole step but
        only the chunks of the others: the caller records the tokens of the decodes.  None means
        that the policy has to be shown each of the decodes.
        """
        output = policy.schedule_beside(decodes, self._view_of(others, now_s))
        if output is None:
            return None
        self._check(output, decodes)
        return self._carry_out(output, now_s, started_s=now_s, beside=decodes)

    def _view_of(self, running: Iterable[Request], now_s: float) -> SchedulerView:
        waiting = self.queues.waiting
        for request_id, num_tokens in self.kv.prefixes.refresh():
            if (request := waiting.get(request_id)) is not None:  # else it is swapped out
                request.num_computed_tokens = num_tokens
        if self._groups:
            self._groups.find_tails()
        return SchedulerView(
            now_s=now_s,
            waiting=InOrder(self.queues),
            running=tuple(running),
            swapped=tuple(self.queues.swapped.values()),
            kv=self.kv,
            limits=self._limits_now(),
            latency_model=self.latency_model,
            num_finishing=len(self.queues.finishing),
        )

    def _limits_now(self) -> Limits:
        """Return the limits of the next step: chunks are limited for the sake of others alone."""
        if self.limits.max_chunk_tokens is None or len(self.queues) > 1:
            return self.limits
        return replace(self.limits, max_chunk_tokens=None)

    def update(self, batch: ScheduledBatch, result: StepResult, now_s: float) -> None:
        """Record the tokens that an executed batch emitted at `now_s`.

        A request that ended while its step ran gets none.  One that failed in it ends as a fault,
        and one whose own rules leave it no token ends, too.
        """
        self._recorder.update(batch, result, now_s)
        if self._groups:
            self._lifecycle.release(self._groups.take_released())

    def on_failed_step(self, batch: ScheduledBatch, now_s: float) -> None:
        """End every request whose KV cache the failed step `batch` may have spoilt, as a fault.

        These are the requests that it computes or copies, and those that count on the blocks of
        these.  What they leave behind is not found in the prefix cache any more.
        """
        self._recorder.on_failed_step(batch, now_s)

    @property
    def has_groups_to_end(self) -> bool:
        """Tell whether the next `schedule` ends requests because others of their groups ended."""
        return self._groups.has_to_end

    def _end_with_their_groups(self, now_s: float) -> None:
        """End the requests of which a sibling was rejected or aborted."""
        for request, reason in self._groups.take_to_end():
            self._lifecycle.end(request, reason, now_s)
        self._groups.stop_if_over()
