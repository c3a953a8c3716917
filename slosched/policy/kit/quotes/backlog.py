"""Whether prompts have waited without a break lately, so that another one takes any time left."""

from __future__ import annotations

import math

_MEMORY_S = 4.0
"""Time after which what was seen counts e times less."""
_LULLS, _NONE = 0.6, 1.0
"""Shares of the time with prompts left over: below the first there are lulls between bursts, from
the second on there is hardly a lull."""


class Backlog:
    """The share of the latest seconds in which the steps left prompts over.

    In a lull the device has time for whoever was let in before.  In an overload that lasts, who is
    let in takes the place of others who are still to come.
    """

    def __init__(self) -> None:
        self._share = 1.0

    def note_step(self, took_s: float, predicted_s: float, *, is_full: bool) -> None:
        """Learn from a step, and the time until the next one, whether it left prompts over.

        Beyond the predicted time of the step the device may have had nothing to do.
        """
        if took_s > 0:
            full = min(1.0, predicted_s / took_s) if is_full else 0.0
            self._share += (1 - math.exp(-took_s / _MEMORY_S)) * (full - self._share)

    @property
    def pressure(self) -> float:
        """Return 0 where lulls follow bursts, 1 where prompts wait all the time, or between."""
        return min(1.0, max(0.0, (self._share - _LULLS) / (_NONE - _LULLS)))
