"""The Scheduler owns the queues and the KV bookkeeping; the policy owns every decision.

`schedule` shows the policy a view, checks its plan against the limits, and only then carries it
out: queues, block tables, progress.  `update` books what the executor produced.  A plan that breaks
a limit raises IllegalPlanError and changes nothing.  The Scheduler knows no clock: the time is
handed to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from slosched.core import (
    BatchShape,
    BlockCopy,
    EndReason,
    IllegalPlanError,
    LatencyModel,
    Limits,
    Policy,
    Request,
    RequestStatus,
    ScheduledBatch,
    ScheduledChunk,
    SchedulerOutput,
    SchedulerView,
    StepResult,
)
from slosched.kv import KVCache


class Scheduler:
    """Waiting, running and swapped requests, and the blocks they hold."""

    def __init__(
        self,
        policy: Policy,
        kv: KVCache,
        limits: Limits | None = None,
        latency_model: LatencyModel | None = None,
    ) -> None:
        self.policy = policy
        self.kv = kv
        self.limits = limits or Limits()
        self.latency_model = latency_model
        self._waiting: OrderedDict[str, Request] = OrderedDict()
        self._running: dict[str, Request] = {}
        self._swapped: dict[str, Request] = {}
        self._ended: list[Request] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_swapped(self) -> int:
        return len(self._swapped)

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running) + len(self._swapped)

    def unfinished(self) -> list[Request]:
        return [*self._running.values(), *self._swapped.values(), *self._waiting.values()]

    def find(self, request_id: str) -> Request | None:
        """The unfinished request of this id."""
        for queue in (self._running, self._swapped, self._waiting):
            if (request := queue.get(request_id)) is not None:
                return request
        return None

    def add_request(self, request: Request) -> None:
        """Queue a new request.

        If its prompt and output limit can never fit into the KV cache it is rejected at once.
        """
        if request.status is not RequestStatus.WAITING or request.num_computed_tokens:
            raise ValueError(f"request {request.request_id!r} is not new: it is {request.status}")
        if self.find(request.request_id) is not None:
            raise ValueError(f"a request with the id {request.request_id!r} is already queued")
        request.deadline_s = self.limits.deadline_rule.next_deadline_s(request)
        self._waiting[request.request_id] = request
        if not self.kv.fits_alone(request.num_prompt_tokens + request.max_tokens):
            self._end(request, EndReason.TOO_LONG, now_s=request.arrival_s)

    def end(self, request_id: str, reason: EndReason, now_s: float) -> bool:
        """End a request from outside; False if it has ended already (or never was).

        The client went away, the device failed, the server stops, or its text is complete.
        """
        if reason.status is RequestStatus.REJECTED:
            raise ValueError(f"only a policy's plan rejects: {request_id!r} cannot end as {reason}")
        request = self.find(request_id)
        if request is None:
            return False
        self._end(request, reason, now_s)
        return True

    def take_ended(self) -> list[Request]:
        """Requests that ended since the last call, each exactly once."""
        ended, self._ended = self._ended, []
        return ended

    def view(self, now_s: float) -> SchedulerView:
        return SchedulerView(
            now_s=now_s,
            waiting=tuple(self._waiting.values()),
            running=tuple(self._running.values()),
            swapped=tuple(self._swapped.values()),
            kv=self.kv,
            limits=self.limits,
            latency_model=self.latency_model,
        )

    def schedule(self, now_s: float) -> ScheduledBatch:
        """Ask the policy and carry out its answer; what the executor has to run."""
        output = self.policy.schedule(self.view(now_s))
        self._check(output)
        return self._carry_out(output, now_s)

    def update(self, batch: ScheduledBatch, result: StepResult, now_s: float) -> None:
        """Book the tokens that came out of an executed batch at `now_s`.

        A request that was aborted while its step ran gets nothing.
        """
        next_deadline_s = self.limits.deadline_rule.next_deadline_s
        token_ids, stopped = result.token_ids, result.stopped
        for request, _, _, emits_token, _ in batch.chunks:
            if not emits_token or request.end_reason is not None:
                continue
            request_id = request.request_id
            request.output_token_ids.append(token_ids[request_id])
            request.token_times_s.append(now_s)
            request.num_output_tokens += 1
            request.deadline_s = next_deadline_s(request)
            if request_id in stopped:
                self._end(request, EndReason.STOP, now_s)
            elif request.num_output_tokens >= request.max_tokens:
                self._end(request, EndReason.LENGTH, now_s)

    def book_decodes(self, times_s: Sequence[float]) -> None:
        """What a step of all running requests, ended at each of `times_s`, would have done.

        They are decodes, none of them ends, and there are blocks enough.  Their tokens are zeros:
        no model runs behind this.
        """
        num_steps = len(times_s)
        token_ids = [0] * num_steps
        for request in self._running.values():
            assert request.is_decode, f"{request.request_id!r} is no decode"
            request.num_computed_tokens += num_steps
            request.num_output_tokens += num_steps
            request.output_token_ids += token_ids
            request.token_times_s += times_s
            request.deadline_s = self.limits.deadline_rule.next_deadline_s(request)
            self.kv.grow(request.request_id, request.num_computed_tokens)

    def _check(self, output: SchedulerOutput) -> None:
        """Raise IllegalPlanError if the plan breaks a limit.  Nothing has been changed yet."""
        swapped_in = set(output.swapped_in)
        leaving = [*output.preempted, *output.swapped_out, *output.rejected]
        if leaving:
            touched = {*leaving, *output.num_scheduled_tokens}
            if len(touched) != len(leaving) + len(output.num_scheduled_tokens):
                raise IllegalPlanError("a request appears twice in the plan")
        if leaving or swapped_in:
            self._check_queues(output, swapped_in)
        num_tokens = num_started = 0
        num_blocks = self.kv.num_free_blocks + sum(
            self.kv.num_held_blocks(request_id) for request_id in leaving
        )
        running, block_size, num_held = self._running, self.kv.block_size, self.kv.num_held_blocks
        for request_id, n in output.num_scheduled_tokens.items():
            request = running.get(request_id)
            if request is None:
                request = self._startable(request_id, swapped_in)
                num_started += 1
            computed = request.num_computed_tokens
            if not 0 < n <= request.num_prompt_tokens + request.num_output_tokens - computed:
                raise IllegalPlanError(
                    f"{request_id!r} is scheduled for {n} tokens, "
                    f"but has {request.num_uncomputed_tokens} uncomputed ones"
                )
            num_tokens += n
            if n == 1 and computed % block_size and request.status is RequestStatus.RUNNING:
                continue  # into a block that it holds
            missing = -(-(computed + n) // block_size) - num_held(request_id)
            if missing > 0:
                num_blocks -= missing
        self._check_totals(output, num_tokens, num_blocks, num_started)

    def _startable(self, request_id: str, swapped_in: set[str]) -> Request:
        queue = self._swapped if request_id in swapped_in else self._waiting
        if (request := queue.get(request_id)) is None:
            raise IllegalPlanError(f"{request_id!r} is scheduled but in no queue it can run from")
        return request

    def _check_queues(self, output: SchedulerOutput, swapped_in: set[str]) -> None:
        for request_id in (*output.preempted, *output.swapped_out):
            if request_id not in self._running:
                raise IllegalPlanError(f"{request_id!r} is preempted but not running")
        if not swapped_in <= output.num_scheduled_tokens.keys():
            raise IllegalPlanError("a request is swapped in but not scheduled")
        if not swapped_in <= self._swapped.keys() or len(swapped_in) != len(output.swapped_in):
            raise IllegalPlanError("a request is swapped in twice, or was not swapped out")
        for request_id, reason in output.rejected.items():
            if reason.status is not RequestStatus.REJECTED:
                raise IllegalPlanError(f"{request_id!r} cannot be rejected for {reason!r}")
            request = self.find(request_id)
            if request is None or request.num_output_tokens:
                raise IllegalPlanError(
                    f"{request_id!r} cannot be rejected: it is unknown or has emitted tokens"
                )

    def _check_totals(
        self, output: SchedulerOutput, num_tokens: int, num_blocks: int, num_started: int
    ) -> None:
        limits = self.limits
        if num_tokens > limits.max_num_batched_tokens:
            raise IllegalPlanError(
                f"{num_tokens} tokens are scheduled, the limit is {limits.max_num_batched_tokens}"
            )
        left = sum(1 for name in output.rejected if name in self._running)
        left += len(output.preempted) + len(output.swapped_out)
        num_running = len(self._running) + num_started - left
        if num_running > limits.max_num_seqs:
            raise IllegalPlanError(
                f"{num_running} requests would run, the limit is {limits.max_num_seqs}"
            )
        if num_blocks < 0:
            raise IllegalPlanError(f"the plan needs {-num_blocks} KV blocks more than there are")
        self._check_swap(output)
        self._check_loras(output)

    def _check_swap(self, output: SchedulerOutput) -> None:
        out = sum(self.kv.num_held_blocks(name) for name in output.swapped_out)
        if out > self.kv.num_free_host_blocks:
            raise IllegalPlanError(
                f"{out} KV blocks are swapped out, the host has {self.kv.num_free_host_blocks} free"
            )
        limit = self.limits.max_num_swapped_blocks
        traffic = out + sum(self.kv.num_held_host_blocks(name) for name in output.swapped_in)
        if limit is not None and traffic > limit:
            raise IllegalPlanError(f"{traffic} KV blocks are swapped, the limit is {limit}")

    def _check_loras(self, output: SchedulerOutput) -> None:
        limit = self.limits.max_loras
        if limit is None:
            return
        requests = [self.find(name) for name in output.num_scheduled_tokens]
        loras = {r.lora_id for r in requests if r is not None} - {None}
        if len(loras) > limit:
            raise IllegalPlanError(f"{len(loras)} LoRA adapters are used, the limit is {limit}")

    def _carry_out(self, output: SchedulerOutput, now_s: float) -> ScheduledBatch:
        for request_id, reason in output.rejected.items():
            request = self.find(request_id)
            assert request is not None
            self._end(request, reason, now_s)
        self._preempt(output.preempted)
        swap_out = self._swap_out(output.swapped_out)
        swap_in = self._swap_in(output.swapped_in)
        chunks = []
        running, tables, grow = self._running, self.kv.block_tables, self.kv.grow
        block_size = self.kv.block_size
        # The named tuple's own constructor is a Python function; this one is not.
        new_tuple, chunk_type = tuple.__new__, ScheduledChunk
        for request_id, n in output.num_scheduled_tokens.items():
            request = running.get(request_id) or self._start(request_id)
            prior = request.num_computed_tokens
            computed = request.num_computed_tokens = prior + n
            emits_token = computed == request.num_prompt_tokens + request.num_output_tokens
            if n == 1 and prior % block_size:
                table = tables[request_id]  # the token goes into a block that it holds
            else:
                table = grow(request_id, computed)
            chunks.append(new_tuple(chunk_type, (request, n, prior, emits_token, table)))
        shape = output.shape or _shape_of(chunks, len(swap_out) + len(swap_in))
        model = self.latency_model
        return ScheduledBatch(
            chunks=tuple(chunks),
            swap_out=tuple(swap_out),
            swap_in=tuple(swap_in),
            shape=shape,
            output=output,
            predicted_s=None if model is None else model.predict(shape),
        )

    def _start(self, request_id: str) -> Request:
        request = self._running[request_id] = self._waiting.pop(request_id)
        request.status = RequestStatus.RUNNING
        return request

    def _preempt(self, request_ids: Iterable[str]) -> None:
        """Victims return to the front of the queue, the last-named first in line."""
        for request_id in request_ids:
            request = self._running.pop(request_id)
            self.kv.free(request_id)
            request.status = RequestStatus.WAITING
            request.num_computed_tokens = 0
            request.num_preemptions += 1
            self._waiting[request_id] = request
            self._waiting.move_to_end(request_id, last=False)

    def _swap_out(self, request_ids: Iterable[str]) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        for request_id in request_ids:
            copies += self.kv.swap_out(request_id)
            request = self._swapped[request_id] = self._running.pop(request_id)
            request.status = RequestStatus.SWAPPED
            request.num_preemptions += 1
            request.num_swaps += 1
        return copies

    def _swap_in(self, request_ids: Iterable[str]) -> list[BlockCopy]:
        copies: list[BlockCopy] = []
        for request_id in request_ids:
            copies += self.kv.swap_in(request_id)
            request = self._running[request_id] = self._swapped.pop(request_id)
            request.status = RequestStatus.RUNNING
        return copies

    def _end(self, request: Request, reason: EndReason, now_s: float) -> None:
        assert not request.status.is_ended, f"{request.request_id!r} would end twice"
        for queue in (self._running, self._swapped, self._waiting):
            queue.pop(request.request_id, None)
        self.kv.free(request.request_id)
        request.status = reason.status
        request.end_reason = reason
        request.end_s = now_s
        self._ended.append(request)


def _shape_of(chunks: Iterable[ScheduledChunk], num_swapped_blocks: int) -> BatchShape:
    shape = BatchShape()
    shape.num_swapped_blocks = num_swapped_blocks
    for chunk in chunks:
        shape.add(chunk.num_new_tokens, chunk.num_prior_tokens)
    return shape
