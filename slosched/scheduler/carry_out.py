"""Carry out a checked plan: change queues, KV blocks and progress, and make the batch to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slosched.core import (
    SLO,
    BatchShape,
    DecodeGroup,
    EndReason,
    LatencyModel,
    ScheduledBatch,
    ScheduledChunk,
    SchedulerOutput,
    group_shape,
)
from slosched.core.merged_blocks import repeated_in
from slosched.kv import KVCache
from slosched.scheduler.groups import Groups
from slosched.scheduler.infeasible import eased_slo
from slosched.scheduler.lifecycle import Lifecycle
from slosched.scheduler.queues import Queues


class CarryOut:
    """Turns plans into batches.  A plan has been checked before it comes here."""

    def __init__(
        self,
        queues: Queues,
        kv: KVCache,
        groups: Groups,
        lifecycle: Lifecycle,
        latency_model: LatencyModel | None,
    ) -> None:
        self._queues = queues
        self._kv = kv
        self._groups = groups
        self._lifecycle = lifecycle
        self._latency_model = latency_model

    def __call__(
        self,
        output: SchedulerOutput,
        now_s: float,
        *,
        started_s: float | None,
        beside: DecodeGroup | None = None,
    ) -> ScheduledBatch:
        """Change queues, block tables and progress as `output` says, and return the batch.

        `started_s` is the begin of the step, if it is known.  The decodes `beside` are served apart
        from the plan; then the batch has no prediction.
        """
        self._reject(output.rejected, now_s)
        self._lifecycle.preempt(output.preempted)
        swap_out = self._lifecycle.swap_out(output.swapped_out)
        # Before any block is taken: what these count on must not be evicted for another request.
        prefixes, running, found = self._kv.prefixes, self._queues.running, output.num_found_tokens
        prefixes.start_all(
            request_id
            for request_id in output.num_scheduled_tokens
            if request_id not in running and request_id not in found
        )
        swap_in = self._lifecycle.swap_in(output.swapped_in)
        if beside is not None:
            self._kv.lend(beside.num_new_blocks)
        chunks = self._chunks(output, started_s)
        to_host, from_host = prefixes.take_copies()
        swap_out += to_host
        swap_in += from_host
        shape, num_copied = output.shape, len(swap_out) + len(swap_in)
        if shape is None:
            shape = BatchShape() if beside is None else group_shape(beside)
            _add_up(shape, chunks, output.draft_token_ids, num_copied)
        elif shape.num_swapped_blocks != num_copied:
            # No plan knows what the prefix cache writes to the host to make room for it.
            shape = shape.copy()
            shape.num_swapped_blocks = num_copied
        model = self._latency_model if beside is None else None
        copies = self._groups.take_copies() if self._groups else ()
        return ScheduledBatch(
            chunks=tuple(chunks),
            swap_out=tuple(swap_out),
            swap_in=tuple(swap_in),
            shape=shape,
            output=output,
            predicted_s=None if model is None else model.predict(shape),
            device_copies=copies,
        )

    def _reject(self, rejected: Mapping[str, EndReason], now_s: float) -> None:
        """End the requests that a plan rejects, or ease their SLO where they are kept.

        A group is eased once in a plan, however many of its members the plan rejects.
        """
        eased: dict[str, SLO] = {}
        for request_id, reason in rejected.items():
            request = self._queues.find(request_id)
            assert request is not None
            name = request_id if request.group is None else request.group.group_id
            slo = eased.get(name) or eased_slo(request, reason)
            if slo is None:
                self._lifecycle.end(request, reason, now_s)
            else:
                self._lifecycle.ease(request, slo)
                eased[name] = slo

    def _chunks(self, output: SchedulerOutput, started_s: float | None) -> list[ScheduledChunk]:
        """Return the scheduled chunks, with blocks for their tokens."""
        chunks: list[ScheduledChunk] = []
        num_noted, found, repeated = 0, output.num_found_tokens, repeated_in(output)
        drafts = output.draft_token_ids
        kv, running, tables = self._kv, self._queues.running, self._kv.block_tables
        prefixes, grow, block_size = kv.prefixes, kv.grow, kv.block_size
        # The named tuple's own constructor is a Python function; this one is not.
        new_tuple, chunk_type = tuple.__new__, ScheduledChunk
        for request_id, n in output.num_scheduled_tokens.items():
            request = running.get(request_id)
            if request is None:
                if request_id in found:
                    prefixes.note_planned(chunks[num_noted:])
                    num_noted = len(chunks)
                    prefixes.start(request_id, found[request_id])
                    self._queues.waiting[request_id].num_computed_tokens = found[request_id]
                request = self._lifecycle.start(request_id, started_s)
                if request.group is not None:
                    self._groups.copy_tail(request)
            prior = request.num_computed_tokens
            if drafts and request_id in drafts:
                computed = request.num_computed_tokens = prior + 1  # of drafts it is not known yet
                chunks.append(ScheduledChunk(request, n, prior, True, grow(request_id, computed)))
                continue
            if repeated and request_id in repeated:
                prior -= 1
            computed = request.num_computed_tokens = prior + n
            emits_token = computed == request.num_prompt_tokens + request.num_output_tokens
            if n == 1 and prior % block_size:
                table = tables[request_id]  # the token goes into a block that it holds
            else:
                table = grow(request_id, computed)
            chunks.append(new_tuple(chunk_type, (request, n, prior, emits_token, table)))
        if drafts:
            # Behind all others: the plan knows of no drafts, and what it has found must not be
            # evicted for them.
            for request, n, prior, _, _ in chunks:
                if request.request_id in drafts:
                    grow(request.request_id, prior + n)
            planned = [without_drafts(chunk, drafts) for chunk in chunks[num_noted:]]
            prefixes.note_planned(planned)
        else:
            prefixes.note_planned(chunks[num_noted:])
        return chunks


def _add_up(
    shape: BatchShape,
    chunks: Iterable[ScheduledChunk],
    drafts: Mapping[str, Sequence[int]],
    num_swapped_blocks: int,
) -> None:
    shape.num_swapped_blocks = num_swapped_blocks
    for chunk in chunks:
        if chunk.request.request_id in drafts:
            shape.add_drafting(chunk.num_new_tokens - 1, chunk.num_prior_tokens)
        else:
            shape.add(chunk.num_new_tokens, chunk.num_prior_tokens)


def without_drafts(chunk: ScheduledChunk, drafts: Mapping[str, Sequence[int]]) -> ScheduledChunk:
    """Return the part of a chunk that computes known tokens, which only a cache may keep."""
    num_drafts = len(drafts.get(chunk.request.request_id, ()))
    return chunk._replace(num_new_tokens=chunk.num_new_tokens - num_drafts)
