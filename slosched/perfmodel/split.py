"""The split of measurements into those that are fitted and those that judge the fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slosched.perfmodel.columns import Columns
from slosched.perfmodel.errors import regimes
from slosched.perfmodel.measurement import Measurement


def folds(measurements: Sequence[Measurement], num_folds: int, seed: int) -> list[list[int]]:
    """Return the indices of each fold; every regime is spread over all folds."""
    rng = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(num_folds)]
    position = 0
    for regime in regimes(measurements):
        members = [i for i, m in enumerate(measurements) if m.regime == regime]
        for i in rng.permutation(members).tolist():
            parts[position % num_folds].append(i)
            position += 1
    return [sorted(part) for part in parts if part]


def covering(measurements: Sequence[Measurement], count: int, seed: int = 0) -> list[int]:
    """Choose the indices of `count` measurements that cover all regions of shapes.

    The share of a regime grows with the square root of its size, so that the few decode-only
    batches of a grid full of mixes are kept. Within a regime the farthest point in the logarithms
    of the sums is taken next (Gonzalez' greedy algorithm for k centres).  O(n · count).
    """
    if count >= len(measurements):
        return list(range(len(measurements)))
    members = {
        r: [i for i, m in enumerate(measurements) if m.regime == r] for r in regimes(measurements)
    }
    total = sum(len(m) ** 0.5 for m in members.values())
    points = np.log1p(Columns([m.shape for m in measurements]).matrix())
    points /= np.maximum(points.std(axis=0), 1e-9)
    rng = np.random.default_rng(seed)
    chosen: list[int] = []
    for indices in members.values():
        share = min(len(indices), max(1, int(count * len(indices) ** 0.5 / total)))
        chosen += _farthest(points, np.array(indices), share, rng)
    return sorted(chosen)


def _farthest(
    points: np.ndarray, indices: np.ndarray, count: int, rng: np.random.Generator
) -> list[int]:
    chosen = [int(rng.choice(indices))]
    distance = np.linalg.norm(points[indices] - points[chosen[0]], axis=1)
    while len(chosen) < count:
        chosen.append(int(indices[int(distance.argmax())]))
        distance = np.minimum(
            distance, np.linalg.norm(points[indices] - points[chosen[-1]], axis=1)
        )
    return chosen


def on_grid(measurement: Measurement) -> bool:
    """Tell whether every size in the batch is zero or a power of two."""
    return all(
        n & (n - 1) == 0
        for n in (*(x for c in set(measurement.chunks) for x in c), _reqs(measurement))
    )


def _reqs(measurement: Measurement) -> int:
    return sum(new == 1 for new, _ in measurement.chunks)
