"""What a token costs at the very least: prices that no legal step of a latency model undercuts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slosched.core import ATTENTION_TILE_TOKENS, BatchShape, LatencyModel, Limits

FloatArray = npt.NDArray[np.float64]

_PREFILL_CELLS, _DECODE_CELLS, _CONTEXT_CELLS, _PAIR_CELLS = 40, 16, 32, 12
_MAX_ROUNDS = 60


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Every legal step takes at least the sum of what its tokens cost at these prices.

    T(shape) >= per_prefill_token_s * t + per_decode_s * Bd + per_pair_s * t2 + per_context_s * t3.
    """

    per_prefill_token_s: float
    per_decode_s: float
    """Never below `per_prefill_token_s`."""
    per_pair_s: float
    """For each (query, key) pair of prefill chunks."""
    per_context_s: float
    """For each token of the decodes' contexts.  Never below `per_pair_s`."""

    def cost_s(self, shape: BatchShape) -> float:
        return (
            self.per_prefill_token_s * shape.num_prefill_tokens
            + self.per_decode_s * shape.num_decodes
            + self.per_pair_s * shape.prefill_attention_tokens
            + self.per_context_s * shape.decode_context_tokens
        )


def step_prices(
    model: LatencyModel, limits: Limits, max_context_tokens: int, weights: FloatArray
) -> StepPrices:
    """The prices that make `weights` (of t, Bd, t2, t3) dearest and still undercut every step.

    The space of legal (t, Bd, t2, t3) is covered with cells.  A step inside a cell takes at least
    as long as the cell's lower corner, with every other field of the shape as small as these four
    allow, and costs at most what its upper corner does; so prices below the former at the latter
    hold everywhere in it.  Cells with and without chunks, and with and without decodes, are apart:
    where a kernel changes, nothing is compared across.  Assumes that `model` is monotone in each
    field of the shape within those kinds; additive it need not be.  No constant per step is
    charged, since a busy device may take its steps as large as it likes.
    """
    lows_s, highs = _cells(model, limits, max_context_tokens)
    return StepPrices(*_dearest(lows_s, highs, weights).tolist())


def _cells(
    model: LatencyModel, limits: Limits, max_context_tokens: int
) -> tuple[FloatArray, FloatArray]:
    """Seconds at each cell's lower corner, shape (n,), and its upper corner, shape (n, 4)."""
    max_tokens = limits.max_num_batched_tokens
    max_decodes = min(limits.max_num_seqs, max_tokens)
    lows_s: list[float] = []
    highs: list[tuple[int, int, int, int]] = []
    for (t, t_high), (d, d_high) in itertools.product(
        _ranges(max_tokens, _PREFILL_CELLS, 1), _ranges(max_decodes, _DECODE_CELLS, 1)
    ):
        if t + d == 0 or t + d > max_tokens:
            continue
        t_high, d_high = min(t_high, max_tokens - d), min(d_high, max_tokens - t)
        for (c, c_high), (p, p_high) in itertools.product(
            _within(d, d_high * max_context_tokens, _CONTEXT_CELLS),
            _within(t, t_high * max_context_tokens, _PAIR_CELLS),
        ):
            lows_s.append(model.predict(_least_shape(t, t_high, d, d_high, p, c)))
            highs.append((t_high, d_high, p_high, c_high))
    return np.array(lows_s), np.array(highs, dtype=np.float64)


def _ranges(most: int, num_cells: int, power: int) -> list[tuple[int, int]]:
    """Cells [low, high] of integers that cover 0 … most, with one for 0 alone."""
    edges = np.ceil(most * (np.arange(num_cells + 1) / num_cells) ** power).astype(np.int64)
    edges = np.unique(edges)
    pairs = itertools.pairwise(edges.tolist())
    return [(0, 0), *((low + 1, high) for low, high in pairs)]


def _within(least: int, most: int, num_cells: int) -> Iterator[tuple[int, int]]:
    """Cells that cover least … most, finer where small; (0, 0) alone if there is nothing."""
    if least == 0:
        yield 0, 0
        return
    for low, high in _ranges(most, num_cells, 2)[1:]:
        if high >= least:
            yield max(low, least), high


def _least_shape(t: int, t_high: int, d: int, d_high: int, p: int, c: int) -> BatchShape:
    """The fields that a step with so many tokens, decodes, pairs and contexts has at least.

    A query row's keys are at most its chunk's context and its tile's walk; a chunk has two tokens
    or more.
    """
    shape = BatchShape()
    shape.num_decodes, shape.decode_context_tokens = d, c
    shape.num_prefill_tokens, shape.prefill_attention_tokens = t, p
    if d:
        shape.max_decode_context_tokens = -(-c // d_high)
    if t:
        shape.num_prefills = 1
        shape.squared_chunk_tokens = 2 * t
        shape.prefill_context_tokens = max(t, -(-p // t_high))
        shape.num_prefill_tiles = -(-t // ATTENTION_TILE_TOKENS)
        shape.prefill_tile_tokens = -(-p // ATTENTION_TILE_TOKENS)
    longest_chunk = -(-p // t_high) if t else 0
    shape.max_context_tokens = max(shape.max_decode_context_tokens, longest_chunk)
    return shape


def _dearest(lows_s: FloatArray, highs: FloatArray, weights: FloatArray) -> FloatArray:
    """max weights @ prices, so that highs @ prices <= lows_s: a linear program by cutting planes.

    What the solver's tolerance leaves is scaled away, so that every cell holds.
    """
    from scipy.optimize import linprog  # slow to import

    scale = np.maximum(highs.max(axis=0), 1.0)
    rows = highs / scale
    order = np.array([[1.0, -1.0, 0.0, 0.0], [0.0, 0.0, 1.0, -1.0]]) / scale
    order /= np.abs(order).max(axis=1, keepdims=True)
    used = {int(np.argmin(lows_s / np.maximum(rows[:, i], 1e-12))) for i in range(4)}
    unit_s = float(lows_s.max()) or 1.0
    gain = weights / scale
    prices: FloatArray = np.zeros(4)
    for _ in range(_MAX_ROUNDS):
        chosen = sorted(used)
        solved = linprog(
            -gain / gain.max(),
            A_ub=np.vstack([rows[chosen], order]),
            b_ub=np.concatenate([lows_s[chosen] / unit_s, np.zeros(2)]),
            bounds=[(0.0, max(1.0, float(scale.max())))] * 4,
        )
        assert solved.status == 0, solved.message
        prices = np.asarray(solved.x, dtype=np.float64) * unit_s
        excess = rows @ prices - lows_s
        worst = np.argsort(excess)[-20:]
        if excess[worst[-1]] <= 1e-7 * unit_s:
            break
        used.update(worst.tolist())
    costs = rows @ prices
    dear = costs > 0
    factor = min(1.0, float((lows_s[dear] / costs[dear]).min())) if dear.any() else 1.0
    first, decode, pair, context = factor * (1 - 1e-9) * prices / scale
    return np.array([min(first, decode), decode, min(pair, context), context])
