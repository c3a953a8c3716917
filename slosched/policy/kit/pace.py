"""The demands of decodes on every step: the time that all take, and when the first is due."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from slosched.core import BatchShape, DecodeGroup, LatencyModel, Request

CHUNK_TOKENS = 64
"""Prompt tokens for which a step must leave time, so that prompts go on: a matrix kernel's tile."""


@dataclass(slots=True)
class Pace:
    """Time that the running decodes need, and time that their deadlines leave.

    A TPOT can be kept if a step no longer than it has time for a tile of a prompt beside the
    decodes: all that ask for this TPOT or a smaller one, and the others as often as their TPOTs
    ask for.  Decodes whose TPOT cannot be kept count as if they asked for the smallest that can.
    """

    all_s: float
    """Predicted time of a step of all decodes and nothing else; 0 if there are none."""
    first_slack_s: float
    """Time until the first decode whose TPOT can be kept is due, below zero if it is late; infinite
    if there are none."""
    tpot_s: float
    """Smallest TPOT that can be kept; infinite if there are none.  If none can be kept it is the
    largest, or infinite if not even one decode alone on the device would keep that."""
    steps_per_s: float
    """Tokens per second that the SLOs ask for, on average over the decodes."""
    least_s: float = 0.0
    """Predicted time of the step, described above, that tells that `tpot_s` can be kept; 0 if no
    TPOT can be kept."""
    shape: BatchShape = field(default_factory=BatchShape)
    """A step of all decodes and nothing else."""
    tiers: Sequence[tuple[float, int]] = ()
    """Number of decodes by TPOT, the smallest TPOT first."""
    keeps_all: bool = False
    """Whether the smallest TPOT for which they ask can be kept."""

    @classmethod
    def of(
        cls, decodes: Sequence[Request], model: LatencyModel, now_s: float, num_lost: int = 0
    ) -> Self:
        """Return the pace of `decodes`, which are sorted by deadline.  O(n).

        The first `num_lost` of them count as if they asked for the largest TPOT of the others, and
        are never due.
        """
        shape = BatchShape()
        if decodes:
            shape.add_decodes([r.num_computed_tokens + 1 for r in decodes])
        kept = decodes[num_lost:]
        tpots_s = Counter([r.slo.tpot_s for r in kept])
        if num_lost:
            tpots_s[max(tpots_s)] += num_lost
        pace = cls.of_sums(tpots_s, math.inf, model, shape)
        pace.first_slack_s = first_slack_s(kept, pace.tpot_s, now_s)
        return pace

    @classmethod
    def of_group(
        cls, decodes: DecodeGroup, model: LatencyModel, now_s: float, shape: BatchShape
    ) -> Self:
        """Return the pace of a group of decodes; `shape` is that of a step of them alone."""
        pace = cls.of_sums(decodes.num_by_tpot_s, math.inf, model, shape)
        pace.first_slack_s = decodes.first_deadline_from(pace.tpot_s) - now_s
        return pace

    @classmethod
    def of_sums(
        cls,
        num_by_tpot_s: Mapping[float, int],
        first_slack_s: float,
        model: LatencyModel,
        shape: BatchShape,
    ) -> Self:
        """Return the pace of decodes of which only sums are known.

        `num_by_tpot_s` counts them by the TPOT of their SLO, `shape` is a step of them alone.
        """
        num_decodes = sum(num_by_tpot_s.values())
        if not num_decodes:
            return cls(0.0, math.inf, math.inf, 0.0)
        # The order is fixed because a sum of floats depends on it.
        tiers = sorted(num_by_tpot_s.items())
        tpot_s, least_s = _tightest(tiers, model, shape)
        tokens_per_s = sum(num / max(own_s, tpot_s) for own_s, num in tiers)
        return cls(
            model.predict(shape),
            first_slack_s,
            tpot_s,
            tokens_per_s / num_decodes,
            least_s,
            shape.copy(),
            tiers,
            keeps_all=least_s > 0 and tpot_s == tiers[0][0],
        )

    def raised(self, tpot_s: float, model: LatencyModel, slack_s: Callable[[float], float]) -> Self:
        """Return the pace if decodes that ask for less than `tpot_s` asked for that instead.

        `slack_s` tells how long it is until the first decode of at least some TPOT is due.
        """
        least_s = min(tpot_s, self.tiers[-1][0])
        tpots_s: Counter[float] = Counter()
        for own_s, num in self.tiers:
            tpots_s[max(own_s, least_s)] += num
        pace = type(self).of_sums(tpots_s, math.inf, model, self.shape)
        pace.first_slack_s = slack_s(pace.tpot_s)
        return pace

    def lowered(
        self, tpot_s: float, model: LatencyModel, slack_s: Callable[[float], float]
    ) -> Self:
        """Return the pace of the same decodes if `tpot_s` is kept, though there are too many now.

        `slack_s` tells how long it is until the first decode of at least some TPOT is due.
        """
        due = _due_within(tpot_s, self.tiers, self.shape)
        tokens_per_s = sum(num / max(own_s, tpot_s) for own_s, num in self.tiers)
        return replace(
            self,
            first_slack_s=slack_s(tpot_s),
            tpot_s=tpot_s,
            steps_per_s=tokens_per_s / self.shape.num_decodes,
            least_s=min(tpot_s, model.predict(due)),
            keeps_all=False,
        )

    def due_within(self, time_s: float) -> BatchShape:
        """Return a step of as many decodes as are due within `time_s`, on average."""
        return _due_within(time_s, self.tiers, self.shape)

    def seat_s(self, output_tokens: int) -> float:
        """Return the time of decodes alone until one of them ends and leaves its seat.

        Of n decodes, which have emitted `output_tokens` in all, one ends with each n-th part of
        their stay.
        """
        num_decodes = self.shape.num_decodes
        return self.all_s * _stay_tokens(output_tokens, num_decodes) / max(1, num_decodes)


def first_place(holds: Callable[[float], bool], tpots_s: Sequence[float]) -> int:
    """Return the place of the first TPOT for which something holds; their number if there is none.

    What holds for one holds for the larger ones, too.  Mostly it is the first, and hundreds may ask
    for one of their own.
    """
    if holds(tpots_s[0]):
        return 0
    return bisect_left(tpots_s, True, lo=1, key=holds)


def first_slack_s(decodes: Iterable[Request], tpot_s: float, now_s: float) -> float:
    """Return the time until the first of `decodes`, sorted by deadline, of such a TPOT is due.

    It is infinite if none of them has a TPOT of at least `tpot_s`.
    """
    return next((r.deadline_s - now_s for r in decodes if r.slo.tpot_s >= tpot_s), math.inf)


def stay_tokens(decodes: Sequence[Request]) -> float:
    """Return how many tokens a decode emits until it ends, on average; 0 if there are none.

    Output lengths are not known.  In a steady state, however, decodes have on average as many
    tokens ahead of them as behind them, so a decode stays for twice the tokens that it has emitted.
    """
    return _stay_tokens(sum([r.num_output_tokens for r in decodes]), len(decodes))


def _stay_tokens(output_tokens: int, num_decodes: int) -> float:
    return 2 * output_tokens / max(1, num_decodes)


def _tightest(
    tiers: Sequence[tuple[float, int]], model: LatencyModel, shape: BatchShape
) -> tuple[float, float]:
    """Return `tpot_s` and `least_s` of decodes, given their number by TPOT, smallest TPOT first."""
    least_s = {math.inf: 0.0}

    def is_kept(tpot_s: float) -> bool:
        if tpot_s < math.inf:
            least = _due_within(tpot_s, tiers, shape)
            least.add(CHUNK_TOKENS, 0)
            least_s[tpot_s] = model.predict(least)
        return least_s[tpot_s] < tpot_s

    tpots_s = [tpot_s for tpot_s, _ in tiers]
    at = first_place(is_kept, tpots_s)
    if at < len(tpots_s):
        return tpots_s[at], least_s[tpots_s[at]]
    largest_s = tpots_s[-1]
    alone_s = model.predict_prefill(1, shape.decode_context_tokens // shape.num_decodes)
    return (largest_s if alone_s <= largest_s else math.inf), 0.0


def _due_within(tpot_s: float, tiers: Sequence[tuple[float, int]], shape: BatchShape) -> BatchShape:
    """Return a step of as many of the decodes as are due within `tpot_s`, on average."""
    if tpot_s == math.inf:
        return shape.copy()
    num_due = max(1, round(sum(num * min(1.0, tpot_s / own_s) for own_s, num in tiers)))
    step = shape.copy()
    step.decode_context_tokens = round(shape.decode_context_tokens * num_due / shape.num_decodes)
    step.num_decodes = num_due
    return step
