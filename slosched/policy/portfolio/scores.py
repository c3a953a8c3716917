"""Which candidate serves the same requests better, and how sure that is.

All candidates replay the same arrivals, so two of them are compared request by request: what they
have in common (a burst, a long prompt) cancels out.  Requests that follow one another share a
queue and are not independent.  So the judged requests are cut into `NUM_BLOCKS` blocks of
consecutive ones, and Student's t is applied to the differences of the blocks (batch means).  Former
evaluations count by `_MEMORY` to the power of their age, as long as the traffic has not turned.

A candidate that dropped out of the replays has fewer blocks, and is compared on those.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

NUM_BLOCKS = 8
LEAST_BLOCKS = 3
"""Least number of blocks from which anything is concluded."""
_MEMORY = 0.75
_MOST_KEPT = 8
"""Evaluations that are remembered; older ones would weigh a tenth at most."""
_SURE = 0.9
"""Confidence of every one-sided statement; an interval holds the truth with 80 %."""

LEAST_JUDGED = 3 * NUM_BLOCKS
"""Least number of judged requests from which anything is concluded."""


class Estimate(NamedTuple):
    """A mean with its interval."""

    mean: float
    low: float
    high: float


class Scores:
    """The shares of good requests under each candidate, by evaluation and block."""

    def __init__(self) -> None:
        self._evaluations: list[dict[str, FloatArray]] = []

    def add(self, good: Mapping[str, Sequence[float]]) -> None:
        """Add an evaluation; each candidate has an entry for each judged request.

        One that dropped out has entries only up to the end of a block.
        """
        num_judged = max(len(each) for each in good.values())
        self._evaluations.append({n: _by_block(each, num_judged) for n, each in good.items()})
        del self._evaluations[:-_MOST_KEPT]

    def forget(self) -> None:
        """Forget all evaluations: the traffic has turned."""
        self._evaluations.clear()

    @property
    def latest(self) -> Collection[str]:
        """Return the candidates of the latest evaluation."""
        return self._evaluations[-1].keys() if self._evaluations else ()

    def share(self, candidate: str) -> Estimate:
        """Return the share of good requests under a candidate, of those that it was judged by."""
        return _estimate([blocks.get(candidate) for blocks in self._evaluations])

    def lead(self, candidate: str, over: str, num_rivals: int = 1) -> Estimate:
        """Return by how much the share of good requests is higher than under another candidate.

        Only evaluations with both of them count.  The candidate that is ahead of `num_rivals` may
        be so by chance: its interval is the wider, the more there are (Bonferroni).
        """
        return _estimate(
            [
                _difference(blocks[candidate], blocks[over])
                if {candidate, over} <= blocks.keys()
                else None
                for blocks in self._evaluations
            ],
            num_rivals,
        )

    def best(self, current: str) -> str:
        """Return the candidate of the latest evaluation with the largest lead over `current`."""
        rivals = [name for name in self.latest if name != current]
        best = max(rivals, key=lambda name: self.lead(name, current).mean, default=current)
        return best if best != current and self.lead(best, current).mean > 0 else current

    def losers(self, best: str, min_gain: float) -> tuple[str, ...]:
        """Return the candidates of the latest evaluation that surely gain less than `min_gain`.

        They gain it, or lose, against `best`.
        """
        return tuple(n for n in self.latest if n != best and self.lead(n, best).high < min_gain)


def ends_of_blocks(num_judged: int) -> list[int]:
    """Return the number of judged requests up to the end of each block."""
    return list(accumulate(len(b) for b in np.array_split(np.empty(num_judged), NUM_BLOCKS)))


def _by_block(good: Sequence[float], num_judged: int) -> FloatArray:
    """Return the share of good requests in each block that `good` reaches to the end of."""
    ends = [end for end in ends_of_blocks(num_judged) if end <= len(good)]
    blocks = np.split(np.asarray(good[: ends[-1]], dtype=np.float64), ends[:-1])
    return np.array([block.mean() for block in blocks])


def _difference(blocks: FloatArray, others: FloatArray) -> FloatArray:
    """Return the differences in the blocks that both have."""
    num = min(len(blocks), len(others))
    return blocks[:num] - others[:num]


def _estimate(evaluations: Sequence[FloatArray | None], num_rivals: int = 1) -> Estimate:
    """Return the mean over evaluations, the latest last, with its interval."""
    weights, means, variances, num_blocks = [], [], [], NUM_BLOCKS
    for age, blocks in enumerate(reversed(evaluations)):
        if blocks is not None:
            weights.append(_MEMORY**age)
            means.append(float(blocks.mean()))
            variances.append(float(blocks.var(ddof=1)) / len(blocks))
            num_blocks = min(num_blocks, len(blocks))
    if not weights:
        return Estimate(math.nan, -math.inf, math.inf)
    share = np.array(weights) / sum(weights)
    mean = float(share @ means)
    margin = _quantile(num_blocks, num_rivals) * math.sqrt(float(share**2 @ variances))
    return Estimate(mean, mean - margin, mean + margin)


@cache
def _quantile(num_blocks: int, num_rivals: int) -> float:
    """Return the quantile of Student's t for the mean of so many blocks."""
    from scipy.special import stdtrit  # slow to import

    return float(stdtrit(num_blocks - 1, 1 - (1 - _SURE) / num_rivals))
