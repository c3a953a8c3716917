"""The least chance to be in time that lets a request in, corrected by what came of others."""

from __future__ import annotations

from slosched.core import Request, RequestStatus

_HIGHEST = 0.5
"""Who is as likely to be in time as not is always let in."""
_STEP = 0.05
"""How much the least chance rises with each request that is late."""


class Strictness:
    """The least chance, which follows the share of those that were let in and are late.

    It begins high, and comes down to `least` while those let in are in time.  One that is late or
    rejected later takes it up.  In the long run the share of these is `most_late`, as far as a
    chance between `least` and 0.5 can bring that about (stochastic approximation, as in adaptive
    conformal inference).  With a `most_late` of 1 it is always `least`.

    Another thread may let requests in while the engine's thread looks.
    """

    def __init__(self, least: float, most_late: float) -> None:
        self._least, self._most_late = least, most_late
        self._is_fixed = most_late >= 1 or least >= _HIGHEST
        self.least_chance = least if self._is_fixed else _HIGHEST
        self._let_in: dict[str, Request] = {}
        """Requests that were let in with a promise and have no token yet."""

    def let_in(self, request: Request) -> None:
        """Count a request that was let in."""
        if not (self._is_fixed or request.is_best_effort):
            self._let_in[request.request_id] = request

    def look(self) -> None:
        """Learn from first tokens and rejections since the last call.  O(requests let in)."""
        for name, request in self._let_in.copy().items():
            has_token = request.num_output_tokens > request.num_output_placeholders
            is_eased = request.asked_slo is not None
            if not (has_token or is_eased or request.status.is_ended):
                continue
            del self._let_in[name]
            if is_eased:
                continue
            if has_token:
                self._learn(request.token_times_s[0] > request.arrival_s + request.slo.ttft_s)
            elif request.status is RequestStatus.REJECTED:
                self._learn(True)

    def _learn(self, is_late: bool) -> None:
        moved = self.least_chance + _STEP * (is_late - self._most_late)
        self.least_chance = min(_HIGHEST, max(self._least, moved))
