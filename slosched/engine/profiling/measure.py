"""Measure planned batches: pass after pass, until every median is stable."""

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
"""A median counts as known once its standard error is below this share of it."""
_NUM_WARM_UPS = 3
_REFERENCE_EVERY_S = 1.0
"""Of measured time: how long a reference is taken to tell the speed of the machine."""
_REFERENCES = 3


@dataclass
class Progress:
    """What a run has done so far; `measure` keeps it up to date."""

    num_batches: int
    num_stable: int = 0
    skipped: dict[PlannedBatch, str] = field(default_factory=dict)
    """Batches that the device had no memory for, and what it said."""
    reference_s: list[float] = field(default_factory=list)
    """The reference batch's times, in the order in which they were taken."""


BatchKey = tuple[tuple[Chunk, ...], int]
"""What tells measured batches apart: their chunks and how many blocks they copied."""


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

    A pass goes through the batches in an order of its own and runs each once: as in a server, the
    step before was another one, so no cache is warmer than it would be; and a slow minute of the
    machine hits every regime a little instead of some batches wholly.  After three passes a batch
    whose median is known to 2 % is left out.  A reference batch is run every second, and its time
    is written to every row, so that drift can be seen and taken out.  `known` are rows of an
    earlier run: what they measured often enough is not run again.  A batch that the device has
    no memory for is skipped.
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
    """True if three times or more tell their median to 2 %, by the spread of their middle half."""
    if len(seconds) < _MIN_PASSES:
        return False
    low, median, high = np.percentile(seconds, (25, 50, 75)).tolist()
    # Of a normal distribution: sigma = IQR / 1.35, standard error of the median 1.25 sigma / √n.
    error = 1.25 * (high - low) / 1.35 / len(seconds) ** 0.5
    return bool(error <= _STABLE * median)


def _is_out_of_memory(error: Exception) -> bool:
    # Of a GPU it is torch.OutOfMemoryError, which only an executor may import, and of a CPU a
    # RuntimeError like any other.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


class _Reference:
    """How long the reference batch takes nowadays."""

    def __init__(self, executor: Executor, limits: ProfileLimits, taken: list[float]) -> None:
        self._run = _Run(executor, limits, reference_batch(limits))
        self._taken = taken
        self._since_s = float("inf")
        for _ in range(_NUM_WARM_UPS):
            self._run.seconds()

    def at(self, measured_s: float) -> float:
        """The median of the latest times; a new one is taken once a second has been measured."""
        self._since_s += measured_s
        if self._since_s >= _REFERENCE_EVERY_S:
            self._since_s = 0.0
            self._taken.append(self._run.seconds())
        return float(np.median(self._taken[-_REFERENCES:]))


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
        """Run it once."""
        result = self._executor.execute(self._batch)
        for chunk in self._batch.chunks:
            self._executor.release(chunk.request.request_id)
        return result.elapsed_s
