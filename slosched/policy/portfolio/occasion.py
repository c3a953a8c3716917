"""When a portfolio asks the simulator again, and how many arrivals it may replay then."""

from __future__ import annotations

import math

from slosched.policy.portfolio.seen import Trouble

_FIRST_HASTE, _HASTE, _DOUBT_HASTE = 8.0, 4.0, 2.0
"""Factors on the effort while nothing is known, if more is wrong than foretold, and if a candidate
is ahead, but not surely."""
_FULL_TROUBLE = 0.05
"""Share of requests in trouble from which on a question may cost all of the effort.

Less is at stake where fewer are in trouble, and the question may cost as much less.
"""
_LONGEST_INTERVAL_S = 40.0
"""Longest time between two evaluations that change nothing."""


class Occasions:
    """The times of questions, each of which the arrivals since the one before have to pay for."""

    def __init__(self, every_s: float, effort: float) -> None:
        self._every_s = every_s
        self._effort = effort
        self._interval_s = every_s
        """Time from an evaluation until the next, if nothing is worse than expected."""
        self._again_s = -math.inf
        self._num_seen_before = 0
        """Number of requests that had arrived at the latest question that was not in vain."""
        self.asked_s = -math.inf
        """Time of the latest question."""
        self._haste = _FIRST_HASTE
        """Factor on the effort for the next question."""
        self.expected = 0.0
        """Share of requests in trouble that the latest evaluation expects."""

    def is_surprise(self, since: Trouble) -> bool:
        """Tell whether more requests since the latest question are in trouble than foretold."""
        return since.exceeds(self.expected)

    def num_affordable(
        self, trouble: Trouble, num_seen: int, now_s: float, *, is_surprise: bool
    ) -> float:
        """Return how many arrivals may be replayed now, over all candidates; 0 if it is too early.

        `num_seen` requests have arrived so far.
        """
        num_new = num_seen - self._num_seen_before
        if (now_s < self._again_s and not is_surprise) or not num_new:
            return 0.0
        effort = self._effort * max(self._haste, _HASTE if is_surprise else 1.0)
        return effort * min(1.0, trouble.share / _FULL_TROUBLE) * num_new

    def conclude(
        self, asked_s: float, num_seen: int, *, is_blank: bool, is_in_doubt: bool, has_changed: bool
    ) -> None:
        """Take what the arrivals until the question have paid for as spent; set the next time.

        The time to the next question doubles, unless the planner or the traffic has changed, one
        candidate is ahead, but not surely, or nothing was learnt (`is_blank`), which costs nothing.
        """
        if has_changed:
            self._interval_s = self._every_s
        elif is_blank or is_in_doubt:
            self._interval_s = 2 * self._every_s
        else:
            longest_s = max(_LONGEST_INTERVAL_S, self._every_s)
            self._interval_s = min(2 * self._interval_s, longest_s)
        self._again_s = asked_s + self._interval_s
        self._haste = _FIRST_HASTE if is_blank else _DOUBT_HASTE if is_in_doubt else 1.0
        if not is_blank:
            self._num_seen_before = num_seen
