"""Times at which refused clients should come again, one after the other."""

from __future__ import annotations

import math

from slosched.policy.kit.quotes.expected import Expected

_SHARE = 0.1
"""Share of the device that those who come again may have; new clients come meanwhile."""
_LEAST_WAIT_S = 5.0
_MAX_WAIT_S = 300.0
_AS_LONG_AGAIN = 2.0
"""Expected rest of an overload over the time that it has lasted."""
_LULL_S = 5.0
"""Time without a refusal after which an overload is over."""


class Returns:
    """Gives each refused client a time of its own, so that they do not come back all at once.

    An overload that has lasted for some time is expected to last for twice that time again.  Nobody
    is told to come before it is over, and those who come after it come one after the other.
    """

    def __init__(self) -> None:
        self._free_s = -math.inf
        """Time from which on nobody was told to come again."""
        self._began_s = self._latest_s = -math.inf
        """Times of the first and of the latest refusal of this overload."""

    def wait_s(self, refused: Expected) -> float:
        """Return the seconds after which the client should come again, at most five minutes.

        The next client is told to come after this one, as far as five minutes allow.
        """
        now_s = refused.request.arrival_s
        if now_s > self._latest_s + _LULL_S:
            self._began_s = now_s
        self._latest_s = now_s
        soonest_s = now_s + max(_LEAST_WAIT_S, _AS_LONG_AGAIN * (now_s - self._began_s))
        wait_s = min(max(soonest_s, self._free_s) - now_s, _MAX_WAIT_S)
        self._free_s = max(self._free_s, now_s + wait_s + refused.work.alone_s / _SHARE)
        return wait_s
