"""Batches of all kinds, and their times on a device that follows a known latency model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from slosched.core import BatchShape, LatencyModel
from slosched.perfmodel import Measurement
from slosched.perfmodel.measurement import Chunk

Chunks = tuple[Chunk, ...]


def make_shape(*chunks: Chunk, num_swapped_blocks: int = 0) -> BatchShape:
    shape = BatchShape()
    for new, prior in chunks:
        shape.add(new, prior)
    shape.num_swapped_blocks = num_swapped_blocks
    return shape


def random_batches(count: int, seed: int = 0, max_prefills: int = 3) -> list[Chunks]:
    """Return decode, prefill and mixed batches in equal parts; prompts continue at random points."""
    rng = np.random.default_rng(seed)

    def log_uniform(low: int, high: int) -> int:
        return int(math.exp(rng.uniform(math.log(low), math.log(high))))

    batches = []
    for i in range(count):
        prefills = [
            (log_uniform(16, 2048), log_uniform(1, 8192))
            for _ in range(0 if i % 3 == 0 else rng.integers(1, max_prefills + 1))
        ]
        decodes = [
            (1, log_uniform(16, 8192))
            for _ in range(0 if i % 3 == 1 else int(rng.integers(1, 128)))
        ]
        batches.append((*prefills, *decodes))
    return batches


def make_measurements(
    batches: Sequence[Chunks],
    truth: LatencyModel,
    noise: float = 0.0,
    swapped_blocks: Sequence[int] = (0,),
    seed: int = 1,
) -> tuple[Measurement, ...]:
    """Return the times that `truth` predicts, times a lognormal factor with sigma `noise`."""
    rng = np.random.default_rng(seed)
    measurements = []
    for i, chunks in enumerate(batches):
        blocks = swapped_blocks[i % len(swapped_blocks)]
        exact = Measurement(chunks, 1.0, num_swapped_blocks=blocks)
        factor = float(rng.lognormal(-0.5 * noise**2, noise)) if noise else 1.0
        measurements.append(replace(exact, seconds=truth.predict(exact.shape) * factor))
    return tuple(measurements)
