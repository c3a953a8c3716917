"""Least prices of a token: no legal step of a latency model takes less than its tokens cost."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, cast

import numpy as np
import numpy.typing as npt

from slosched.core import ATTENTION_TILE_TOKENS, BatchShape, Limits

FloatArray = npt.NDArray[np.float64]

_PREFILL_CELLS, _DECODE_CELLS, _CONTEXT_CELLS, _PAIR_CELLS = 40, 16, 32, 12
_MAX_ROUNDS = 60


class StepTimes(Protocol):
    """The part of a latency model that a bound needs."""

    def predict(self, shape: BatchShape) -> float:
        """Return the seconds that one step of this shape takes."""


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Prices at which every legal step takes at least as long as its contents cost.

    T(shape) >= per_step_s + per_prefill_token_s * t + per_decode_s * Bd + per_pair_s * t2
    + per_context_s * t3.
    """

    per_prefill_token_s: float
    per_decode_s: float
    """Never below `per_prefill_token_s`."""
    per_pair_s: float
    """The price of each (query, key) pair of prefill chunks."""
    per_context_s: float
    """The price of each token of the decodes' contexts.  Never below `per_pair_s`."""
    per_step_s: float = 0.0

    def cost_s(self, shape: BatchShape) -> float:
        return (
            self.per_step_s
            + self.per_prefill_token_s * shape.num_prefill_tokens
            + self.per_decode_s * shape.num_decodes
            + self.per_pair_s * shape.prefill_attention_tokens
            + self.per_context_s * shape.decode_context_tokens
        )


class LegalSteps:
    """All steps that the limits and the KV cache allow, in cells, and the least time of each cell.

    The space of legal (t, Bd, t2, t3) is covered with cells.  A step inside a cell takes at least
    as long as the cell's lower corner, with every other field of the shape as small as these four
    allow.  It costs at most as much as the upper corner.  So prices at which the upper corner costs
    no more than the lower corner takes hold in the whole cell.  Cells with and without chunks are
    separate, and so are those with and without decodes, so that nothing is compared across a change
    of kernel.  Assumes that within these kinds `model` is monotone in each field of the shape; it
    need not be additive.

    All that a step works on lies in the KV cache at that time, even if requests were preempted or
    swapped before: the contexts of its decodes and its longest chunk are at most `kv_tokens`.  This
    is how memory is charged: a step cannot spread its cost over more context than fits.
    """

    def __init__(
        self,
        model: StepTimes,
        limits: Limits,
        max_context_tokens: int,
        kv_tokens: int | None = None,
    ) -> None:
        most_tokens = limits.max_num_batched_tokens
        held = limits.max_num_seqs * max_context_tokens + most_tokens
        self._kv_tokens = held if kv_tokens is None else kv_tokens
        self._most_tokens = min(most_tokens, self._kv_tokens)
        self._most_decodes = min(limits.max_num_seqs, self._most_tokens)
        self._max_context_tokens = min(max_context_tokens, self._kv_tokens)
        lows_s: list[float] = []
        highs: list[tuple[int, int, int, int, int]] = []
        predict = model.predict
        for least, most in self._cells():
            lows_s.append(predict(least))
            highs.append(most)
        self._lows_s = np.array(lows_s)
        self._highs = np.array(highs, dtype=np.float64)
        self._found: dict[bytes, StepPrices] = {}

    def dearest(self, weights: FloatArray) -> StepPrices:
        """Return the prices that still hold and make `weights` (of t, Bd, t2, t3, steps) dearest.

        At these prices a policy does not gain, on average, by computing contexts anew instead of
        decoding.
        """
        key = weights.tobytes()
        if key not in self._found:
            prices = _dearest(self._lows_s, self._highs, weights)
            self._found[key] = StepPrices(*prices.tolist())
        return self._found[key]

    def _cells(self) -> Iterator[tuple[BatchShape, tuple[int, int, int, int, int]]]:
        """Yield the least shape of each cell, and its greatest (t, Bd, t2, t3, steps).

        As there may be 200,000 cells, they share one shape, which the next cell changes.
        """
        max_tokens, longest = self._most_tokens, self._max_context_tokens
        for (t, t_high), (d, d_high) in itertools.product(
            _ranges(max_tokens, _PREFILL_CELLS, 1), _ranges(self._most_decodes, _DECODE_CELLS, 1)
        ):
            if t + d == 0 or t + d > max_tokens:
                continue
            t_high, d_high = min(t_high, max_tokens - d), min(d_high, max_tokens - t)
            most_context = min(d_high * longest, self._kv_tokens - t)
            shape = _of_counts(t, d)
            for c, c_high in _within(d, most_context, _CONTEXT_CELLS):
                shape.decode_context_tokens = c
                shape.max_decode_context_tokens = -(-c // d_high) if d else 0
                most_pairs = t_high * min(longest, self._kv_tokens - c)
                for p, p_high in _within(t, most_pairs, _PAIR_CELLS):
                    _set_pairs(shape, p, t_high)
                    yield shape, (t_high, d_high, p_high, c_high, 1)


_kept = lru_cache(maxsize=4)(LegalSteps)


def legal_steps(
    model: StepTimes, limits: Limits, max_context_tokens: int, kv_tokens: int | None
) -> LegalSteps:
    """Return `LegalSteps`, cached: they are the same for all bounds and rates of a trace."""
    return _kept(cast("Hashable", model), limits, max_context_tokens, kv_tokens)


def _ranges(most: int, num_cells: int, power: int) -> list[tuple[int, int]]:
    """Return cells [low, high] of integers that cover 0 … most, with one for 0 alone."""
    edges = np.ceil(most * _edges(num_cells, power)).astype(np.int64).tolist()
    pairs = itertools.pairwise(edges)
    return [(0, 0), *[(low + 1, high) for low, high in pairs if low < high]]


@lru_cache
def _edges(num_cells: int, power: int) -> FloatArray:
    return np.asarray((np.arange(num_cells + 1) / num_cells) ** power)


@lru_cache(maxsize=4096)
def _within(least: int, most: int, num_cells: int) -> list[tuple[int, int]]:
    """Return cells that cover least … most, finer where small; only (0, 0) if `least` is 0."""
    if least == 0:
        return [(0, 0)]
    ranges = _ranges(most, num_cells, 2)[1:]
    return [(max(low, least), high) for low, high in ranges if high >= least]


def _of_counts(t: int, d: int) -> BatchShape:
    """Return the least fields of a step with t prefill tokens and d decodes, but no contexts yet.

    A chunk has two tokens or more.
    """
    shape = BatchShape()
    shape.num_decodes, shape.num_prefill_tokens = d, t
    if t:
        shape.num_prefills = 1
        shape.squared_chunk_tokens = 2 * t
        shape.num_prefill_tiles = -(-t // ATTENTION_TILE_TOKENS)
    return shape


def _set_pairs(shape: BatchShape, p: int, t_high: int) -> None:
    """Set the least fields of a step with p pairs, once those of its decodes are set.

    The keys of a query row are at most its chunk's context, and at most the tokens that its tile
    walks over.
    """
    longest = shape.max_decode_context_tokens
    t = shape.num_prefill_tokens
    if t:
        chunk = -(-p // t_high)
        shape.prefill_attention_tokens = p
        shape.prefill_context_tokens = chunk if chunk > t else t
        shape.prefill_tile_tokens = -(-p // ATTENTION_TILE_TOKENS)
        if chunk > longest:
            longest = chunk
    shape.max_context_tokens = longest


def _recompute(weights: FloatArray) -> list[float]:
    """Return the row by which a decode costs at most as much as computing its mean context anew."""
    decodes, contexts = float(weights[1]), float(weights[3])
    k = contexts / decodes if decodes else 1.0
    return [-k, 1.0, -k * (k + 1) / 2, k, 0.0]


def _dearest(lows_s: FloatArray, highs: FloatArray, weights: FloatArray) -> FloatArray:
    """Maximize weights @ prices so that highs @ prices <= lows_s, by cutting planes.

    The prices are then scaled down by the solver's tolerance, so that every cell holds.
    """
    from scipy.optimize import linprog  # slow to import

    scale = np.maximum(highs.max(axis=0), 1.0)
    rows = highs / scale
    order = np.array([[1, -1, 0, 0, 0], [0, 0, 1, -1, 0], _recompute(weights)]) / scale
    order /= np.abs(order).max(axis=1, keepdims=True)
    used = {int(np.argmin(lows_s / np.maximum(rows[:, i], 1e-12))) for i in range(5)}
    unit_s = float(lows_s.max()) or 1.0
    gain = weights / scale
    prices: FloatArray = np.zeros(5)
    for _ in range(_MAX_ROUNDS):
        chosen = sorted(used)
        solved = linprog(
            -gain / gain.max(),
            A_ub=np.vstack([rows[chosen], order]),
            b_ub=np.concatenate([lows_s[chosen] / unit_s, np.zeros(3)]),
            bounds=[(0.0, max(1.0, float(scale.max())))] * 5,
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
    first, decode, pair, context, step = factor * (1 - 1e-9) * prices / scale
    return np.array([min(first, decode), decode, min(pair, context), context, step])
