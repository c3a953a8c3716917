"""The amount of something that a device gets done in a second, as a mean over times past."""

from __future__ import annotations

import math

_MEMORIES_S = (0.5, 2.0, 8.0, 32.0)
"""Times over which means are taken; each forgets exponentially."""
_LEAST = 1e-9
"""Least speed, so that nothing takes infinitely long."""
_LEAST_SHARE = 0.02
"""Least share of the speed that is left beside what overtakes."""


class Speed:
    """The mean amount done in a second, over half a second, 2, 8 and 32 seconds past."""

    def __init__(self, first: float, first_s: float) -> None:
        """Begin with a speed `first`, as if it had been observed for `first_s` seconds."""
        self._means = [FadingMean(first, first_s, memory_s) for memory_s in _MEMORIES_S]

    def observe(self, amount: float, seconds: float) -> None:
        """Learn how much was done in `seconds` in which there was something to do."""
        for mean in self._means:
            mean.add(amount, seconds)

    def seconds_for(self, amount: float, overtaking: float = 0.0) -> float:
        """Return how long `amount` will take if `overtaking` a second arrives and goes first.

        The speed is the mean over the shortest time past that is at least half as long as the
        result, since a long wait sees more of the device than its latest half second.
        """
        seconds = 0.0
        for mean in self._means:
            speed = max(mean.value - overtaking, _LEAST_SHARE * mean.value)
            seconds = amount / max(speed, _LEAST)
            if seconds <= 2 * mean.memory_s:
                break
        return seconds


class FadingMean:
    """An amount for each second, in which what is past counts less and less."""

    def __init__(self, first: float, first_s: float, memory_s: float) -> None:
        """Begin with `first`, as if it had been observed for `first_s` seconds."""
        self.memory_s = memory_s
        self._amount, self._seconds = first * first_s, first_s

    def add(self, amount: float, seconds: float) -> None:
        kept = math.exp(-seconds / self.memory_s)
        self._amount = kept * self._amount + amount
        self._seconds = kept * self._seconds + seconds

    @property
    def value(self) -> float:
        return self._amount / self._seconds
