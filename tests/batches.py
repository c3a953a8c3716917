"""Batches for an executor, written by hand instead of by a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from slosched.core import (
    BatchShape,
    BlockCopy,
    Request,
    SamplingParams,
    ScheduledBatch,
    ScheduledChunk,
    SchedulerOutput,
    StepResult,
)

GREEDY = SamplingParams(ignore_eos=True)


def make_prompt_request(
    request_id: str,
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    max_tokens: int = 100,
) -> Request:
    return Request(
        request_id=request_id,
        arrival_s=0.0,
        num_prompt_tokens=len(prompt),
        max_tokens=max_tokens,
        prompt_token_ids=list(prompt),
        sampling=sampling,
    )


def make_chunk(
    request: Request, block_table: Sequence[int], n: int | None = None
) -> ScheduledChunk:
    """Return a chunk of the next `n` tokens (default: all that are left), and count them as computed."""
    prior = request.num_computed_tokens
    n = request.num_tokens - prior if n is None else n
    request.num_computed_tokens += n
    emits = request.num_computed_tokens == request.num_tokens
    return ScheduledChunk(request, n, prior, emits, block_table)


def make_batch(
    *chunks: ScheduledChunk,
    swap_out: Sequence[BlockCopy] = (),
    swap_in: Sequence[BlockCopy] = (),
) -> ScheduledBatch:
    shape = BatchShape()
    for chunk in chunks:
        shape.add(chunk.num_new_tokens, chunk.num_prior_tokens)
    shape.num_swapped_blocks = len(swap_out) + len(swap_in)
    return ScheduledBatch(chunks, tuple(swap_out), tuple(swap_in), shape, SchedulerOutput())


def book(batch: ScheduledBatch, result: StepResult) -> None:
    """Append the tokens of a result to the requests, as the scheduler does."""
    for chunk in batch.chunks:
        if chunk.emits_token:
            chunk.request.output_token_ids.append(result.token_ids[chunk.request.request_id])
            chunk.request.num_output_tokens += 1
