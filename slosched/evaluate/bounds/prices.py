"""What a token costs at the very least: prices that no legal step of a latency model undercuts."""

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
        """Seconds for one step of this shape."""


@dataclass(frozen=True, slots=True)
class StepPrices:
    """Every legal step takes at least the sum of what it holds costs at these prices.

    T(shape) >= per_step_s + per_prefill_token_s * t + per_decode_s * Bd + per_pair_s * t2
    + per_context_s * t3.
    """

    per_prefill_token_s: float
    per_decode_s: float
    """Never below `per_prefill_token_s`."""
    per_pair_s: float
    """For each (query, key) pair of prefill chunks."""
    per_context_s: float
    """For each token of the decodes' contexts.  Never below `per_pair_s`."""
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
    """Every step that limits and KV cache allow, in cells, and how long those take at least.

    The space of legal (t, Bd, t2, t3) is covered with cells.  A step inside a cell takes at least
    as long as the cell's lower corner, with every other field of the shape as small as these four
    allow, and costs at most what its upper corner does; so prices below the former at the latter
    hold everywhere in it.  Cells with and without chunks, and with and without decodes, are apart:
    where a kernel changes, nothing is compared across.  Assumes that `model` is monotone in each
    field of the shape within those kinds; additive it need not be.

    All that a step works on lies in the KV cache at that time, whoever was preempted or swapped
    before: the contexts of its decodes and its longest chunk are `kv_tokens` at most.  That is how
    memory is charged: a step cannot spread what it costs over more context than fits.
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
        lows_s, highs = [], []
        for least, most in self._cells():
            lows_s.append(model.predict(least))
            highs.append(most)
        self._lows_s = np.array(lows_s)
        self._highs = np.array(highs, dtype=np.float64)
        self._found: dict[bytes, StepPrices] = {}

    def dearest(self, weights: FloatArray) -> StepPrices:
        """The prices that make `weights` (of t, Bd, t2, t3, steps) dearest and still hold.

        Nor do they let a policy gain by computing contexts anew instead of decoding, on average.
        """
        key = weights.tobytes()
        if key not in self._found:
            prices = _dearest(self._lows_s, self._highs, weights)
            self._found[key] = StepPrices(*prices.tolist())
        return self._found[key]

    def _cells(self) -> Iterator[tuple[BatchShape, tuple[int, int, int, int, int]]]:
        """The least shape of each cell, and the most of (t, Bd, t2, t3, steps) in it."""
        max_tokens, longest = self._most_tokens, self._max_context_tokens
        for (t, t_high), (d, d_high) in itertools.product(
            _ranges(max_tokens, _PREFILL_CELLS, 1), _ranges(self._most_decodes, _DECODE_CELLS, 1)
        ):
            if t + d == 0 or t + d > max_tokens:
                continue
            t_high, d_high = min(t_high, max_tokens - d), min(d_high, max_tokens - t)
            most_context = min(d_high * longest, self._kv_tokens - t)
            for c, c_high in _within(d, most_context, _CONTEXT_CELLS):
                most_pairs = t_high * min(longest, self._kv_tokens - c)
                for p, p_high in _within(t, most_pairs, _PAIR_CELLS):
                    most = (t_high, d_high, p_high, c_high, 1)
                    yield _least_shape(t, t_high, d, d_high, p, c), most


_kept = lru_cache(maxsize=4)(LegalSteps)


def legal_steps(
    model: StepTimes, limits: Limits, max_context_tokens: int, kv_tokens: int | None
) -> LegalSteps:
    """`LegalSteps`, kept: they are the same for all bounds of a trace and at all its rates."""
    return _kept(cast("Hashable", model), limits, max_context_tokens, kv_tokens)


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


def _recompute(weights: FloatArray) -> list[float]:
    """What a decode costs beyond computing its whole, mean context anew: nothing, or less."""
    decodes, contexts = float(weights[1]), float(weights[3])
    k = contexts / decodes if decodes else 1.0
    return [-k, 1.0, -k * (k + 1) / 2, k, 0.0]


def _dearest(lows_s: FloatArray, highs: FloatArray, weights: FloatArray) -> FloatArray:
    """max weights @ prices, so that highs @ prices <= lows_s: a linear program by cutting planes.

    What the solver's tolerance leaves is scaled away, so that every cell holds.
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
