"""Measurement of planned batches, pass after pass, until every median is stable."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from slosched.core import BatchShape, Executor, Request, ScheduledBatch, ScheduledChunk
from slosched.engine.profiling.plan import PlannedBatch, ProfileLimits, reference_batch
from slosched.kv import KVCache
from slosched.perfmodel.measurement import Chunk, Measurement

_NAME = "profiling"
_MIN_PASSES = 3
_STABLE = 0.02
"""The largest relative standard error with which a median counts as known."""
_NUM_WARM_UPS = 3
_REFERENCE_EVERY_S = 1.0
"""Seconds of measured time between two runs of the reference batch."""
_REFERENCES = 3


@dataclass
class Progress:
    """The progress of a run, which `measure` keeps up to date."""

    num_batches: int
    num_stable: int = 0
    skipped: dict[PlannedBatch, str] = field(default_factory=dict)
    """The batches that the device had no memory for, each with the device's message."""
    reference_s: list[float] = field(default_factory=list)
    """The reference batch's times, in the order in which they were taken."""


BatchKey = tuple[tuple[Chunk, ...], int]
"""The key of a measured batch: its chunks and the number of blocks that it copied."""


def measure(
    executor: Executor,
    limits: ProfileLimits,
    batches: Sequence[PlannedBatch],
    *,
    max_passes: int = 7,
    seed: int = 0,
    known: Sequence[Measurement] = (),
    progress: Progress | None = None,
) -> Iterator[Measurement]:
    """Yield one measurement of each batch in each pass, as it is taken.

    Each pass runs every batch once, in a random order of its own (the first keeps the order of the
    plan).  As in a server, the step before is another batch, so no cache is unrealistically warm;
    and a slow minute of the machine spreads over all regimes.  After three passes, batches whose
    median is known to 2 % are left out.

    A reference batch runs about once a second.  Every row carries its time, so that drift of the
    machine can be seen and corrected.  `known` are rows of an earlier run: batches that they
    measured often enough are not run again.  Batches that the device has no memory for are skipped.
    Raises ValueError if `max_passes` is below 1.
    """
    if max_passes < 1:
        raise ValueError(f"max_passes must be at least 1, not {max_passes}")
    progress = progress if progress is not None else Progress(len(batches))
    times: Mapping[BatchKey, list[float]] = defaultdict(list)
    for row in known:
        times[row.chunks, row.num_swapped_blocks].append(row.seconds)
    progress.num_stable = sum(is_stable(times[b.chunks, b.num_swapped_blocks]) for b in batches)
    reference = _Reference(executor, limits, progress.reference_s)
    rng = np.random.default_rng(seed)
    for number in range(max_passes):
        # The first pass keeps the order of the plan, whose beginning covers every regime.
        order = np.arange(len(batches)) if number == 0 else rng.permutation(len(batches))
        for planned in (batches[i] for i in order):
            taken = times[planned.chunks, planned.num_swapped_blocks]
            if planned in progress.skipped or len(taken) > number or is_stable(taken):
                continue
            try:
                seconds = _Run(executor, limits, planned).seconds()
            except (MemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                progress.skipped[planned] = str(error)
                continue
            taken.append(seconds)
            progress.num_stable += is_stable(taken)
            yield Measurement(
                planned.chunks,
                seconds,
                num_swapped_blocks=planned.num_swapped_blocks,
                reference_s=reference.at(seconds),
            )


def is_stable(seconds: Sequence[float]) -> bool:
    """Tell whether three times or more fix their median to 2 %, by the interquartile range."""
    if len(seconds) < _MIN_PASSES:
        return False
    low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
    # In a normal distribution, sigma = IQR / 1.35; the standard error of its median is 1.25 sigma /
    # √n.
    error = 1.25 * (high - low) / 1.35 / len(seconds) ** 0.5
    return bool(error <= _STABLE * median)


def _is_out_of_memory(error: Exception) -> bool:
    # A GPU raises torch.OutOfMemoryError, whose class only an executor may import.  A CPU raises a
    # plain RuntimeError.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


class _Reference:
    """The current time of the reference batch, which shows the speed of the machine."""

    def __init__(self, executor: Executor, limits: ProfileLimits, taken: list[float]) -> None:
        self._run = _Run(executor, limits, reference_batch(limits))
        self._taken = taken
        self._since_s = float("inf")
        for _ in range(_NUM_WARM_UPS):
            self._run.seconds()

    def at(self, measured_s: float) -> float:
        """Return the median of the latest reference times.

        Takes a new one first if a second of measured time has passed since the last.
        """
        self._since_s += measured_s
        if self._since_s >= _REFERENCE_EVERY_S:
            self._since_s = 0.0
            self._taken.append(self._run.seconds())
        return float(np.median(self._taken[-_REFERENCES:]))


class _Run:
    """A planned batch on the device; its requests pretend that their prior tokens are computed."""

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
        copies = []
        if planned.num_swapped_blocks:
            kv.grow(_NAME, planned.num_swapped_blocks * kv.block_size)
            copies = kv.swap_out(_NAME)
        self._batch = ScheduledBatch(
            chunks=tuple(chunks),
            swap_out=() if planned.swaps_in else tuple(copies),
            swap_in=tuple(copies) if planned.swaps_in else (),
            shape=shape,
        )

    def seconds(self) -> float:
        """Run the batch once and return its step time in seconds."""
        result = self._executor.execute(self._batch)
        for chunk in self._batch.chunks:
            self._executor.release(chunk.request.request_id)
        return result.elapsed_s
