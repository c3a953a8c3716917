"""The limits that a plan must obey before the Scheduler carries it out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from slosched.core import (
    DecodeGroup,
    IllegalPlanError,
    KVView,
    Limits,
    Request,
    RequestStatus,
    SchedulerOutput,
)
from slosched.scheduler.queues import Queues
from slosched.scheduler.turns import turns_of

_RUNNING = RequestStatus.RUNNING


class Spare(NamedTuple):
    """Tokens and free KV blocks that a plan leaves to the step."""

    num_tokens: int
    num_blocks: int


def no_plan(planner: str, output: object) -> str:
    """Return what is wrong with an output of a class named `planner` that is no plan."""
    kind = "None" if output is None else f"the {type(output).__name__} {output!r:.50}"
    return f"{planner}.schedule returned {kind}, not a SchedulerOutput"


@dataclass(frozen=True, slots=True)
class PlanCheck:
    """A check that raises IllegalPlanError for a plan that breaks a limit; it changes nothing."""

    queues: Queues
    kv: KVView
    limits: Limits
    planner: str = "Policy"
    """Name of the class of the policy whose plans these are."""

    def __call__(self, output: object, decodes: DecodeGroup | None = None) -> Spare:
        """Check a plan, which may be for all requests but the `decodes` of the same step.

        Return what it leaves.
        """
        if not isinstance(output, SchedulerOutput):
            raise IllegalPlanError(no_plan(self.planner, output))
        num_tokens = num_started = num_left = num_lent = 0
        num_blocks, ledger = self.kv.num_free_blocks, self.kv.ledger()
        if output.rejected or output.preempted or output.swapped_out or output.swapped_in:
            leaving = self._leaving(output)
            num_blocks += sum(map(ledger.leave, leaving))
            num_left = sum(1 for name in leaving if name in self.queues.running)
        if decodes is not None:
            num_tokens += decodes.num_decodes
            num_lent = decodes.num_new_blocks
            num_blocks -= num_lent
            if output.preempted or output.swapped_out or output.swapped_in:
                raise IllegalPlanError("a plan beside grouped decodes preempts or swaps")
        running, block_size = self.queues.running, self.kv.block_size
        num_ready, turns = ledger.num_ready_blocks, turns_of(output, ledger, num_lent)
        num_busy = len(running) + len(self.queues.finishing) - num_left
        planned = output.num_scheduled_tokens.items()
        chunks: Collection[tuple[str, int]] = planned
        if not turns:  # nearly always; hundreds of decodes go on in blocks that they hold
            chunks = [
                (request_id, n)
                for request_id, n in planned
                if n != 1
                or (request := running.get(request_id)) is None
                or not (computed := request.num_computed_tokens) % block_size
                or computed >= request.num_prompt_tokens + request.num_output_tokens
            ]
            num_tokens += len(planned) - len(chunks)
        for request_id, n in chunks:
            request = running.get(request_id)
            if request is None:
                request = self._startable(request_id, output.swapped_in)
                num_started += 1
            computed = turns.num_prior_tokens(request, n) if turns else request.num_computed_tokens
            if not 0 < n <= request.num_prompt_tokens + request.num_output_tokens - computed:
                raise IllegalPlanError(
                    f"{request_id!r} is scheduled for {n} tokens, "
                    f"but has {request.num_tokens - computed} uncomputed ones"
                )
            num_tokens += n
            missing = -(-(computed + n) // block_size) - num_ready(request_id)
            if missing > 0:
                num_blocks -= missing
            if request.status is not _RUNNING:
                ledger.start(request_id)
                self._check_start(request_id, num_blocks, num_busy + num_started)
        num_running = len(running) + num_started - num_left
        self._check_totals(output, num_tokens, num_blocks, num_running)
        return Spare(self.limits.max_num_batched_tokens - num_tokens, num_blocks)

    def _check_start(self, request_id: str, num_blocks_left: int, num_running: int) -> None:
        watermark = self.limits.num_watermark_blocks
        if 0 <= num_blocks_left < watermark and num_running > 1:
            raise IllegalPlanError(
                f"{request_id!r} starts and leaves {num_blocks_left} KV blocks free, the watermark "
                f"is {watermark}"
            )

    def _startable(self, request_id: str, swapped_in: tuple[str, ...]) -> Request:
        queue = self.queues.swapped if request_id in swapped_in else self.queues.waiting
        if (request := queue.get(request_id)) is None:
            raise IllegalPlanError(f"{request_id!r} is scheduled but in no queue it can run from")
        return request

    def _leaving(self, output: SchedulerOutput) -> list[str]:
        """Return the requests that give back blocks, after checking the queues they are in."""
        queues, scheduled = self.queues, output.num_scheduled_tokens
        leaving = [*output.preempted, *output.swapped_out, *output.rejected]
        if len({*leaving, *scheduled}) != len(leaving) + len(scheduled):
            raise IllegalPlanError("a request appears twice in the plan")
        for request_id in (*output.preempted, *output.swapped_out):
            if request_id not in queues.running:
                raise IllegalPlanError(f"{request_id!r} is preempted but not running")
        swapped_in = set(output.swapped_in)
        if not swapped_in <= scheduled.keys():
            raise IllegalPlanError("a request is swapped in but not scheduled")
        if not swapped_in <= queues.swapped.keys() or len(swapped_in) != len(output.swapped_in):
            raise IllegalPlanError("a request is swapped in twice, or was not swapped out")
        for request_id, reason in output.rejected.items():
            if reason.status is not RequestStatus.REJECTED:
                raise IllegalPlanError(f"{request_id!r} cannot be rejected for {reason!r}")
            request = queues.find(request_id)
            if request is None or request.num_output_tokens:
                raise IllegalPlanError(
                    f"{request_id!r} cannot be rejected: it is unknown or has emitted tokens"
                )
        return leaving

    def _check_totals(
        self, output: SchedulerOutput, num_tokens: int, num_blocks: int, num_running: int
    ) -> None:
        limits = self.limits
        if num_tokens > limits.max_num_batched_tokens:
            raise IllegalPlanError(
                f"{num_tokens} tokens are scheduled, the limit is {limits.max_num_batched_tokens}"
            )
        if num_running > limits.max_num_seqs:
            raise IllegalPlanError(
                f"{num_running} requests would run, the limit is {limits.max_num_seqs}"
            )
        if num_blocks < 0:
            raise IllegalPlanError(f"the plan needs {-num_blocks} KV blocks more than there are")
        if output.swapped_out or output.swapped_in:
            self._check_swap(output)
        if limits.max_loras is not None:
            self._check_loras(output, limits.max_loras)
        if limits.max_chunk_tokens is not None and len(self.queues) > 1:
            self._check_chunks(output, limits.max_chunk_tokens)

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

    def _check_loras(self, output: SchedulerOutput, limit: int) -> None:
        requests = [self.queues.find(name) for name in output.num_scheduled_tokens]
        loras = {r.lora_id for r in requests if r is not None} - {None}
        if len(loras) > limit:
            raise IllegalPlanError(f"{len(loras)} LoRA adapters are used, the limit is {limit}")

    def _check_chunks(self, output: SchedulerOutput, limit: int) -> None:
        for request_id, n in output.num_scheduled_tokens.items():
            if n > limit:
                raise IllegalPlanError(
                    f"{request_id!r} is scheduled for {n} tokens, the limit of one request is "
                    f"{limit}"
                )
