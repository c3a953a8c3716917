"""How soon idle prefixes are used again: a life table of the returns so far."""

from __future__ import annotations

import math
from bisect import bisect_right
from heapq import heappop, heappush

from slosched.kv.eviction.lines import Line

_BOUNDS_S = (0.0, *(0.125 * 2**k for k in range(16)))
"""Begins of the intervals of age; the last one ends at 4,096 s, where a line counts as gone."""
_NUM_CLASSES = 3
_MOST_RETURNS = 4096
"""Returns after which the table forgets half of what it knows, so that it follows the traffic."""
_OWN_WEIGHT = 4.0
"""Pauses of its own after which a line's pace counts as much as that of all lines."""
_PRIOR_RETURNS = 0.5
"""Returns that the table pretends to have seen in each interval at the start."""


class LifeTable:
    """The rate of returns of idle lines, by their age and by how often they have returned before.

    The rate in an interval of age is the number of returns in it over the time that lines have
    spent in it, those included that have not returned yet or never will (the occurrence and
    exposure rate of survival analysis).  So it falls where most of those that are still idle have
    gone for good.

    Lines have a pace: the geometric mean of their own pauses over that of all, drawn to 1 where
    there are few.  Ages are divided by it, so that an agent's short pauses and a reader's long ones
    share one table.  All times are in seconds.
    """

    def __init__(self) -> None:
        num = len(_BOUNDS_S)
        self._returns = [[_PRIOR_RETURNS] * num for _ in range(_NUM_CLASSES)]
        # Before anything is known, a line's rate of return falls with its age.
        self._idle_s = [[bound_s + 1.0 for bound_s in _BOUNDS_S] for _ in range(_NUM_CLASSES)]
        self._num_returns = 0
        self._num_pauses, self._log_pause_sum = 1.0, math.log(5.0)
        self._idle: dict[Line, tuple[float, float, int]] = {}
        """For each idle line since when it is, its pace, and its class."""
        self._to_come: list[tuple[float, int, Line, float, int]] = []
        """Heap of the times at which idle lines reach the next interval: time, number, line, the
        time since when it was idle, and the interval."""
        self._num_queued = 0

    def leave(self, line: Line, now_s: float) -> None:
        """Note that a line has been idle since `now_s`."""
        self._idle[line] = now_s, self._pace(line), min(line.num_gaps, _NUM_CLASSES - 1)
        self._queue(line, now_s, 1)

    def come_back(self, line: Line, now_s: float) -> None:
        """Note that a line is used again, if it was idle."""
        found = self._idle.pop(line, None)
        if found is None:
            return
        since_s, pace, kind = found
        age_s = (now_s - since_s) / pace
        interval = bisect_right(_BOUNDS_S, age_s) - 1
        self._returns[kind][interval] += 1
        self._idle_s[kind][interval] += age_s - _BOUNDS_S[interval]
        self._num_pauses += 1
        self._log_pause_sum += math.log(max(now_s - since_s, 1e-3))
        self._num_returns += 1
        if self._num_returns >= _MOST_RETURNS:
            self._forget_half()

    def advance(self, now_s: float) -> None:
        """Count the time that idle lines have spent up to `now_s`.  O(log lines) an interval."""
        while self._to_come and self._to_come[0][0] <= now_s:
            _, _, line, since_s, interval = heappop(self._to_come)
            found = self._idle.get(line)
            if found is None or found[0] != since_s:
                continue
            self._idle_s[found[2]][interval - 1] += _BOUNDS_S[interval] - _BOUNDS_S[interval - 1]
            if interval + 1 < len(_BOUNDS_S):
                self._queue(line, since_s, interval + 1)
            else:
                del self._idle[line]

    def rate(self, line: Line, now_s: float) -> tuple[float, float]:
        """Return an idle line's returns for each second of waiting, and until when that holds.

        It is the largest, over all times to give up waiting, of the chance that the line returns by
        then over the mean time waited (Gittins' index).  So a line that is about to return for sure
        is worth waiting for, although it never returns just now.  O(intervals).
        """
        found = self._idle.get(line)
        if found is None:
            return 0.0, math.inf
        since_s, pace, kind = found
        age_s = max(0.0, (now_s - since_s) / pace)
        first = bisect_right(_BOUNDS_S, age_s) - 1
        best, chance, waited_s, still_idle = 0.0, 0.0, 0.0, 1.0
        for interval in range(first, len(_BOUNDS_S) - 1):
            rate = self._returns[kind][interval] / self._idle_s[kind][interval]
            more_s = _BOUNDS_S[interval + 1] - max(age_s, _BOUNDS_S[interval])
            returning = still_idle * -math.expm1(-rate * more_s)
            chance += returning
            waited_s += returning / rate
            still_idle -= returning
            best = max(best, chance / waited_s)
        is_last = first + 1 == len(_BOUNDS_S)
        return best / pace, math.inf if is_last else since_s + pace * _BOUNDS_S[first + 1]

    def _pace(self, line: Line) -> float:
        log_mean = self._log_pause_sum / self._num_pauses
        more = line.log_gap_sum - line.num_gaps * log_mean
        return math.exp(more / (_OWN_WEIGHT + line.num_gaps))

    def _queue(self, line: Line, since_s: float, interval: int) -> None:
        self._num_queued += 1
        at_s = since_s + self._idle[line][1] * _BOUNDS_S[interval]
        heappush(self._to_come, (at_s, self._num_queued, line, since_s, interval))

    def _forget_half(self) -> None:
        for table in (*self._returns, *self._idle_s):
            table[:] = [value / 2 for value in table]
        self._num_pauses /= 2
        self._log_pause_sum /= 2
        self._num_returns //= 2
