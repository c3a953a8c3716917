"""Measure how long real batches take: what to run, and how to run it on any executor.

The profiler drives an executor with batches of its own making; it knows no model and no device,
only the shapes that it asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from slosched.core import (
    BatchShape,
    BlockCopy,
    Executor,
    Request,
    ScheduledBatch,
    ScheduledChunk,
    StepResult,
)
from slosched.kv import KVCache
from slosched.perfmodel.measurement import Chunk, Measurement

_NAME = "profiling"


@dataclass(frozen=True)
class ProfileLimits:
    """What the batches of a plan may need."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_context_tokens: int
    """Longest context of one request."""
    num_blocks: int
    block_size: int
    num_host_blocks: int = 0

    def fits(self, chunks: Sequence[Chunk], num_swapped_blocks: int = 0) -> bool:
        blocks = num_swapped_blocks + sum(
            -(-(new + prior) // self.block_size) for new, prior in chunks
        )
        return (
            sum(new for new, _ in chunks) <= self.max_num_batched_tokens
            and len(chunks) <= self.max_num_seqs
            and all(new + prior <= self.max_context_tokens for new, prior in chunks)
            and blocks <= self.num_blocks
            and num_swapped_blocks <= self.num_host_blocks
        )


@dataclass(frozen=True)
class PlannedBatch:
    """One batch to measure."""

    chunks: tuple[Chunk, ...]
    num_swapped_blocks: int = 0


def plan_batches(
    limits: ProfileLimits, *, num_random: int = 60, seed: int = 0
) -> list[PlannedBatch]:
    """A grid of pure prefills, pure decodes and swaps, and random mixed batches, shuffled.

    Shuffled, so that a run that is cut short has seen every regime.
    """
    rng = np.random.default_rng(seed)
    batches = [*_prefill_grid(limits), *_decode_grid(limits)]
    batches += [_random_mix(limits, rng) for _ in range(num_random)]
    planned = [PlannedBatch(chunks) for chunks in dict.fromkeys(batches)] + list(_swaps(limits))
    planned = [b for b in planned if limits.fits(b.chunks, b.num_swapped_blocks)]
    return [planned[i] for i in rng.permutation(len(planned))]


def _doubling(first: int, last: int) -> list[int]:
    """first, 1.5 first, 2 first, 3 first, … up to last, which is always in it."""
    values = []
    value = first
    while value < last:
        values += [value, value * 3 // 2]
        value *= 2
    return [*(v for v in values if v < last), last]


def _prefill_grid(limits: ProfileLimits) -> Iterator[tuple[Chunk, ...]]:
    longest = min(limits.max_num_batched_tokens, limits.max_context_tokens)
    for new in _doubling(16, longest):
        for prior in (0, 256, 1024, 4096):
            yield ((new, prior),)
    for new in _doubling(32, longest // 2):
        yield ((new, 0), (new, 0))


def _decode_grid(limits: ProfileLimits) -> Iterator[tuple[Chunk, ...]]:
    for num_decodes in _doubling(1, min(limits.max_num_seqs, 256)):
        for prior in (32, 128, 512, 2048, 8192):
            yield ((1, prior),) * num_decodes


def _random_mix(limits: ProfileLimits, rng: np.random.Generator) -> tuple[Chunk, ...]:
    """Decodes of uneven context beside one to three chunks, log-uniform in every size."""

    def size(low: int, high: int) -> int:
        return int(np.exp(rng.uniform(np.log(low), np.log(max(low + 1, high)))))

    context = limits.max_context_tokens
    chunks: list[Chunk] = []
    for _ in range(rng.integers(1, 4)):
        new = max(2, size(8, min(limits.max_num_batched_tokens, context)))
        chunks.append((new, size(1, context) if rng.random() < 0.5 else 0))
    chunks += [(1, size(8, context)) for _ in range(size(1, limits.max_num_seqs))]
    kept: list[Chunk] = []
    for chunk in chunks:
        if limits.fits([*kept, chunk]):
            kept.append(chunk)
    return tuple(kept) or ((1, 0),)


def _swaps(limits: ProfileLimits) -> Iterator[PlannedBatch]:
    """One decode beside copies out to the host, of several sizes."""
    largest = min(limits.num_host_blocks, limits.num_blocks - 4, 256)
    if largest >= 4:
        for num_blocks in _doubling(4, largest):
            yield PlannedBatch(((1, 32),), num_blocks)


def measure(
    executor: Executor,
    limits: ProfileLimits,
    batches: Sequence[PlannedBatch],
    *,
    repeats: int = 3,
) -> Iterator[Measurement]:
    """Run each batch once to warm up and `repeats` times to measure; yield each as it is done."""
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    for planned in batches:
        run = _Run(executor, limits, planned)
        run.once()
        seconds = [run.once().elapsed_s for _ in range(repeats)]
        low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
        yield Measurement(
            chunks=planned.chunks,
            seconds=median,
            num_swapped_blocks=planned.num_swapped_blocks,
            repeats=repeats,
            spread_s=(high - low) / 2,
        )


class _Run:
    """One planned batch on the device: requests that pretend to have computed their prior."""

    def __init__(self, executor: Executor, limits: ProfileLimits, planned: PlannedBatch) -> None:
        self._executor = executor
        kv = KVCache(limits.num_blocks, limits.block_size, limits.num_host_blocks)
        chunks = []
        shape = BatchShape()
        for i, (new, prior) in enumerate(planned.chunks):
            name = f"{_NAME}-{i}"
            request = Request(name, 0.0, num_prompt_tokens=prior + new, max_tokens=1)
            table = kv.grow(name, prior + new)
            chunks.append(ScheduledChunk(request, new, prior, True, table))
            shape.add(new, prior)
        shape.num_swapped_blocks = planned.num_swapped_blocks
        self._batch = ScheduledBatch(
            chunks=tuple(chunks),
            swap_out=tuple(self._copies(kv, planned.num_swapped_blocks)),
            swap_in=(),
            shape=shape,
        )

    def once(self) -> StepResult:
        result = self._executor.execute(self._batch)
        for chunk in self._batch.chunks:
            self._executor.release(chunk.request.request_id)
        return result

    @staticmethod
    def _copies(kv: KVCache, num_blocks: int) -> list[BlockCopy]:
        if not num_blocks:
            return []
        kv.grow(_NAME, num_blocks * kv.block_size)
        return kv.swap_out(_NAME)
