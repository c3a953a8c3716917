"""Record what a batch gave: tokens, or the requests that a failed step has spoilt."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable

from slosched.core import (
    PLACEHOLDER,
    EndReason,
    Limits,
    Request,
    ScheduledBatch,
    StepResult,
)
from slosched.kv import KVCache
from slosched.scheduler.carry_out import without_drafts
from slosched.scheduler.lifecycle import Lifecycle
from slosched.scheduler.queues import Queues
from slosched.scheduler.speculation import Speculation


class Recorder:
    """Writes the results of batches into their requests, also those that are only foreseen."""

    def __init__(
        self,
        queues: Queues,
        kv: KVCache,
        limits: Limits,
        lifecycle: Lifecycle,
        speculation: Speculation | None,
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._limits = limits
        self._lifecycle = lifecycle
        self._speculation = speculation
        self._foreseen: ScheduledBatch | None = None

    def begin(self, batch: ScheduledBatch, now_s: float) -> None:
        """Write when the requests of a step that was planned ahead began to run."""
        for request, *_ in batch.chunks:
            if request.started_s is None and request.end_reason is None:
                request.started_s = now_s

    def foresee(self, batch: ScheduledBatch, ends_s: float) -> None:
        """Write placeholders for the tokens of a running step, and the time at which it ends."""
        next_deadline_s = self._limits.deadline_rule.next_deadline_s
        self._foreseen = batch
        for request, _, _, emits_token, _ in batch.chunks:
            if request.end_reason is not None or not emits_token:
                continue
            request.output_token_ids.append(PLACEHOLDER)
            request.token_times_s.append(ends_s)
            request.num_output_placeholders = 1
            request.num_output_tokens += 1
            if request.num_output_tokens >= request.max_tokens:
                self._queues.remove(request)
                self._queues.finishing[request.request_id] = request
            else:
                request.deadline_s = next_deadline_s(request)

    def update(self, batch: ScheduledBatch, result: StepResult, now_s: float) -> None:
        """Write the tokens of an executed batch, and end the requests that they complete."""
        if result.failed:
            self._end_failed(batch, result.failed, now_s)
        for request_id in result.barred:
            self._end(request_id, EndReason.NO_TOKEN, now_s)
        next_deadline_s = self._limits.deadline_rule.next_deadline_s
        token_ids, stopped = result.token_ids, result.stopped
        is_foreseen, self._foreseen = batch is self._foreseen, None
        chunks = batch.chunks
        if batch.drafts:
            self._kv.prefixes.note_computed([without_drafts(c, batch.drafts) for c in chunks])
            self._accept(batch, result, now_s)
        else:
            self._kv.prefixes.note_computed(chunks)
        for request, _, _, emits_token, _ in chunks:
            if not emits_token or request.end_reason is not None:
                continue
            request_id = request.request_id
            if is_foreseen:
                request.num_output_placeholders = 0
                request.output_token_ids[-1] = token_ids[request_id]
                request.token_times_s[-1] = now_s
            else:
                request.output_token_ids.append(token_ids[request_id])
                request.token_times_s.append(now_s)
                request.num_output_tokens += 1
            request.deadline_s = next_deadline_s(request)
            if request_id in stopped:
                self._lifecycle.end(request, EndReason.STOP, now_s)
            elif request.num_output_tokens >= request.max_tokens:
                self._lifecycle.end(request, EndReason.LENGTH, now_s)

    def _accept(self, batch: ScheduledBatch, result: StepResult, now_s: float) -> None:
        """Append the draft tokens that were accepted, and free the blocks of the others."""
        assert self._speculation is not None
        for chunk in batch.chunks:
            request, request_id = chunk.request, chunk.request.request_id
            drafts = batch.drafts.get(request_id)
            if drafts is None or request.end_reason is not None:
                continue
            num_accepted = result.num_accepted.get(request_id, 0)
            request.output_token_ids += drafts[:num_accepted]
            request.token_times_s += [now_s] * num_accepted
            request.num_output_tokens += num_accepted
            request.num_computed_tokens += num_accepted
            self._kv.shrink(request_id, request.num_computed_tokens)
            self._speculation.note(request_id, len(drafts), num_accepted)

    def on_failed_step(self, batch: ScheduledBatch, now_s: float) -> None:
        """End the requests that a failed batch computes or copies, and those that count on them."""
        output = batch.output
        self._fault(
            [chunk.request for chunk in batch.chunks],
            (*output.num_scheduled_tokens, *output.swapped_out),
            now_s,
        )

    def _end_failed(self, batch: ScheduledBatch, failed: Container[str], now_s: float) -> None:
        """End the `failed` requests of a batch, and forget what the prefix cache has of them.

        It drops all blocks that no request holds, since it does not know which of them are theirs,
        and what the host got of them.
        """
        requests = [
            chunk.request
            for chunk in batch.chunks
            if chunk.request.request_id in failed and chunk.request.end_reason is None
        ]
        self._fault(requests, [request.request_id for request in requests], now_s)
        self._kv.prefixes.flush()

    def _fault(self, failed: Collection[Request], request_ids: Iterable[str], now_s: float) -> None:
        """End `request_ids` and those that count on what `failed` requests compute, as faults."""
        prefixes = self._kv.prefixes
        for request_id in (*request_ids, *prefixes.counting_on(failed)):
            self._end(request_id, EndReason.FAULT, now_s)
        prefixes.on_failed_step(failed)

    def _end(self, request_id: str, reason: EndReason, now_s: float) -> None:
        """End a request, unless it has ended already."""
        if (request := self._queues.find(request_id)) is not None:
            self._lifecycle.end(request, reason, now_s)
