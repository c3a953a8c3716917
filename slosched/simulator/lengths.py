"""Output lengths still to come, estimated from requests that have ended and from those that run.

Of requests that began together the short ones end first.  Who draws from the finished ones alone
takes outputs for too short, most of all soon after the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


class Lengths:
    """The distribution of output lengths by Kaplan and Meier's estimate.

    A request that has not ended counts among those that reached each length up to its own.  Beyond
    the longest finished one every token is the last with the same chance: the number of finished
    requests over that of all emitted tokens.
    """

    def __init__(self, ended: Sequence[int], unended: Sequence[int]) -> None:
        known, running = np.sort(np.array(ended, dtype=np.int64)), np.sort(unended)
        self._lengths, num_ended = np.unique(known, return_counts=True)
        num_reached = len(known) - np.searchsorted(known, self._lengths)
        num_reached += len(running) - np.searchsorted(running, self._lengths)
        self._longer = np.cumprod(1 - num_ended / np.maximum(num_reached, 1))
        """For each length of a finished request the share of all that are longer."""
        self._mean_tokens = (sum(ended) + sum(unended)) / max(1, len(ended))

    def longer_than(self, num_tokens: int, place: float) -> int:
        """Return a length above `num_tokens`; `place` in [0, 1) says where in the distribution."""
        first = int(np.searchsorted(self._lengths, num_tokens, side="right"))
        share = (1 - place) * (self._longer[first - 1] if first else 1.0)
        index = first + int(np.searchsorted(-self._longer[first:], -share, side="right"))
        if index < len(self._lengths):
            return int(self._lengths[index])
        longest, left = num_tokens, 1 - place
        if first < len(self._lengths):
            longest, left = int(self._lengths[-1]), float(share / self._longer[-1])
        return longest + max(1, round(-self._mean_tokens * math.log(left)))
