"""The amount of something that a device gets done in a second, as a mean over times past."""

from __future__ import annotations

import math

_MEMORIES_S = (0.5, 2.0, 8.0, 32.0)
"""Times over which means are taken; each forgets exponentially."""
_LEAST = 1e-9
"""Least speed, so that nothing takes infinitely long."""
_LEAST_SHARE = 0.02
"""Least share of the speed that is left beside what overtakes."""
_FORGET_S = 30.0
"""Time after which a speed that has not been seen again has come e times nearer to 1."""


class Speed:
    """The mean amount done in a second, over half a second, 2, 8 and 32 seconds past."""

    def __init__(self, first: float, first_s: float) -> None:
        """Begin with a speed `first`, as if it had been observed for `first_s` seconds."""
        self._means = [FadingMean(first, first_s, memory_s) for memory_s in _MEMORIES_S]

    def observe(self, amount: float, seconds: float, unseen_s: float = 0.0) -> None:
        """Learn how much was done in `seconds` in which there was something to do.

        Before these nothing was seen for `unseen_s`.
        """
        for mean in self._means:
            mean.forget(unseen_s)
            mean.add(amount, seconds)

    def seconds_for(self, amount: float, overtaking: float = 0.0, unseen_s: float = 0.0) -> float:
        """Return how long `amount` will take if `overtaking` a second arrives and goes first.

        The speed is the mean over the shortest time past that is at least half as long as the
        result, since a long wait sees more of the device than its latest half second.  It was last
        seen `unseen_s` ago (see `remembered`).
        """
        seconds = 0.0
        for mean in self._means:
            seen = remembered(mean.value, unseen_s)
            speed = max(seen - overtaking, _LEAST_SHARE * seen)
            seconds = amount / max(speed, _LEAST)
            if seconds <= 2 * mean.memory_s:
                break
        return seconds


def remembered(speed: float, unseen_s: float) -> float:
    """Return what to believe of a speed that was last seen `unseen_s` ago.

    It comes back to 1, the speed that the latency model says.  Otherwise whoever refuses requests
    since the device was slow would never see that it has recovered.
    """
    return 1 + (speed - 1) * math.exp(-max(0.0, unseen_s) / _FORGET_S)


class FadingMean:
    """An amount for each second, in which what is past counts less and less."""

    def __init__(self, first: float, first_s: float, memory_s: float) -> None:
        """Begin with `first`, as if it had been observed for `first_s` seconds."""
        self.memory_s = memory_s
        self._amount, self._seconds, self._least_s = first * first_s, first_s, first_s

    def add(self, amount: float, seconds: float) -> None:
        seconds = max(0.0, seconds)  # the clock may have been set back
        kept = math.exp(-seconds / self.memory_s)
        self._amount = kept * self._amount + amount
        self._seconds = kept * self._seconds + seconds

    def forget(self, unseen_s: float) -> None:
        """Let what was seen count less, and come nearer to 1 (see `remembered`)."""
        if unseen_s > 0:
            value = remembered(self.value, unseen_s)
            kept_s = self._seconds * math.exp(-unseen_s / self.memory_s)
            self._seconds = max(kept_s, self._least_s)
            self._amount = value * self._seconds

    @property
    def value(self) -> float:
        return self._amount / self._seconds


class RecentSpeed:
    """The mean amount done in a second, over the latest seconds in which it was observed."""

    def __init__(self, first: float, first_s: float, memory_s: float) -> None:
        """Begin with `first`, as if it had been observed for `first_s` seconds."""
        self._mean = FadingMean(first, first_s, memory_s)
        self._seen_s = -math.inf
        """When it was last observed."""

    def observe(self, amount: float, seconds: float, end_s: float) -> None:
        """Learn how much was done in the `seconds` before `end_s`."""
        self._mean.forget(end_s - seconds - self._seen_s)
        self._mean.add(amount, seconds)
        self._seen_s = end_s

    def at(self, now_s: float) -> float:
        """Return what to believe of it at `now_s` (see `remembered`)."""
        return remembered(self._mean.value, now_s - self._seen_s)
