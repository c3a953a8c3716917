"""The demands of decodes on every step: the time that all take, and when the first is due."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from slosched.core import BatchShape, DecodeGroup, LatencyModel, Request


@dataclass(slots=True)
class Pace:
    """Time that the running decodes need, and time that their deadlines leave."""

    all_s: float
    """Predicted time of a step of all decodes and nothing else; 0 if there are none."""
    first_slack_s: float
    """Time until the first decode is due, below zero if it is late; infinite if there are none."""
    tpot_s: float
    """Smallest TPOT of their SLOs; infinite if there are none."""
    steps_per_s: float
    """Tokens per second that the SLOs ask for, on average over the decodes."""

    @classmethod
    def of(cls, decodes: Sequence[Request], model: LatencyModel, now_s: float) -> Self:
        """Return the pace of `decodes`, which are sorted by deadline.  O(n)."""
        shape = BatchShape()
        if decodes:
            shape.add_decodes([r.num_computed_tokens + 1 for r in decodes])
        tpots_s = Counter([r.slo.tpot_s for r in decodes])
        first_slack_s = decodes[0].deadline_s - now_s if decodes else 0.0
        return cls.of_sums(tpots_s, first_slack_s, model, shape)

    @classmethod
    def of_group(
        cls, decodes: DecodeGroup, model: LatencyModel, now_s: float, shape: BatchShape
    ) -> Self:
        """Return the pace of a group of decodes; `shape` is that of a step of them alone."""
        first_slack_s = decodes.first_deadline_s - now_s
        return cls.of_sums(decodes.num_by_tpot_s, first_slack_s, model, shape)

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
        tokens_per_s = sum(num / tpot_s for tpot_s, num in sorted(num_by_tpot_s.items()))
        return cls(
            model.predict(shape), first_slack_s, min(num_by_tpot_s), tokens_per_s / num_decodes
        )

    def seat_s(self, decodes: Sequence[Request]) -> float:
        """Return the time of decodes alone until one of them ends and leaves its seat.

        Output lengths are not known.  In a steady state, however, decodes have on average as many
        tokens ahead of them as behind them, so a decode stays for twice the tokens that it has
        emitted.  Of n decodes one ends with each n-th part of that stay.
        """
        num_decodes = max(1, len(decodes))
        stay_tokens = 2 * sum([r.num_output_tokens for r in decodes]) / num_decodes
        return self.all_s * stay_tokens / num_decodes
