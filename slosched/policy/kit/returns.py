"""Times at which refused clients should come again, one after the other."""

from __future__ import annotations

import math

from slosched.policy.kit.quote import Expected

_SHARE = 0.5
"""Share of the device that those who come again may have; new clients come meanwhile."""
_MAX_WAIT_S = 60.0


class Returns:
    """Gives each refused client a time of its own, so that they do not come back all at once."""

    def __init__(self) -> None:
        self._free_s = -math.inf
        """Time from which on nobody was told to come again."""

    def wait_s(self, refused: Expected) -> float:
        """Return the seconds after which the client should come again, at most a minute.

        They are at least what is expected beyond the promise, and long enough that all who were
        told to come before it can be served in half of the device's time.  The next client is told
        to come after this one.
        """
        request = refused.request
        late_s = refused.quote.ttft_s[0.5] - request.slo.ttft_s
        soonest_s = request.arrival_s + min(max(0.0, late_s), request.slo.ttft_s)
        at_s = max(soonest_s, self._free_s)
        wait_s = min(at_s - request.arrival_s, _MAX_WAIT_S)
        self._free_s = request.arrival_s + wait_s + refused.work_s / _SHARE
        return wait_s
