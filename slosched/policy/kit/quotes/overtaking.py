"""How much later a prompt is done because shorter ones that are still to arrive overtake it."""

from __future__ import annotations

from collections import deque

from slosched.policy.kit.quotes.speed import Speed

_NUM_ARRIVALS = 256
"""Number of latest arrivals that say which share of the device shorter prompts take."""
_LEAST_WATCH_S = 1.0
"""Least time over which these arrivals are counted."""


class Overtaking:
    """The latest arrivals, under a policy that serves short prompts first.

    Another thread may ask while arrivals are noted.
    """

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, int, float]] = deque(maxlen=_NUM_ARRIVALS)
        """Time, prompt tokens and work of each."""

    def note(self, arrival_s: float, num_tokens: int, work_s: float) -> None:
        """Note the arrival of a prompt whose prefill takes `work_s` alone on the device."""
        self._arrivals.append((arrival_s, num_tokens, work_s))

    def prefills_s(
        self, needed_s: float, num_tokens: int, speed: Speed, now_s: float, unseen_s: float
    ) -> float:
        """Return how long `needed_s` of prefills take: those before a prompt and its own.

        Prompts shorter than its `num_tokens` overtake it as they arrived lately.  As long as all
        that ever came are remembered, they are not taken to bring more than they have so far: a
        burst tells nothing of a time that is longer than itself.  `unseen_s` is how long ago
        `speed` was observed.
        """
        arrivals = self._arrivals.copy()  # at once, as a list of it may let another thread in
        if not arrivals:
            return speed.seconds_for(needed_s, unseen_s=unseen_s)
        since_s = arrivals.popleft()[0]  # the first one begins the time over which they are counted
        shorter_s = sum([each_s for _, length, each_s in arrivals if length < num_tokens])
        overtaking = shorter_s / max(_LEAST_WATCH_S, now_s - since_s)
        seconds = speed.seconds_for(needed_s, overtaking, unseen_s)
        if len(arrivals) + 1 == _NUM_ARRIVALS:
            return seconds
        return min(seconds, speed.seconds_for(needed_s + shorter_s, unseen_s=unseen_s))
