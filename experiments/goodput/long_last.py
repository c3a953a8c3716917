"""A variant of goodput for overloads that last: prompts for which there will be no time go last."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate

from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit.pausing import tokens_per_s_beside
from slosched.policy.kit.punctual import Order
from slosched.policy.kit.shortage import Shortage
from slosched.policy.kit.unkeepable import behind_others

_OVERLOAD = 1.25
"""Tokens of arrivals, as a multiple of those for which decodes leave time, from which on there will
be no time for the longest prompts."""


@dataclass
class LongLast(Goodput):
    """A variant in which prompts go last for which there is no time in the long run.

    While some prompt is late, and the latest arrivals bring more tokens than decodes leave time
    for, the shortest of them that fit tell how long a prompt may be.  Moore and Hodgson's rule
    alone serves a longer one whenever all that wait just now can be in time.
    """

    def order(self, shortage: Shortage) -> Order:
        """Return the order of goodput, with the prompts behind the others that are too long."""
        order = super().order(shortage)
        most_tokens = self._most_tokens(shortage) if order.late else math.inf
        too_long = [r for r in order.in_time if r.num_uncomputed_tokens > most_tokens]
        if not too_long:
            return order
        in_time = [r for r in order.in_time if r.num_uncomputed_tokens <= most_tokens]
        return behind_others(Order(in_time, order.late), too_long)

    def _most_tokens(self, shortage: Shortage) -> float:
        """Return the tokens of the longest prompt for which there is time in the long run."""
        now_s, arrivals = shortage.view.now_s, self._worth._arrivals
        room = tokens_per_s_beside(shortage.pace, shortage.view, self.min_share)
        if self._worth.tokens_per_s(now_s) <= _OVERLOAD * room:
            return math.inf
        lengths = sorted([a.num_tokens for a in arrivals])
        num = bisect_right(list(accumulate(lengths)), room * (now_s - arrivals[0].arrival_s))
        return lengths[max(0, num - 1)]
