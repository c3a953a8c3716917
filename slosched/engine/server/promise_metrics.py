"""Histograms for GET /metrics of how well first tokens keep to what was expected and promised."""

from __future__ import annotations

import math
from collections.abc import Iterator

from slosched.core import Policy, Request
from slosched.engine.server.prometheus import SECONDS, SIGNED_SECONDS, HistogramByTier
from slosched.policy.door import Door


class PromiseMetrics:
    """Expected TTFTs, their errors, and the slack with which requests are first scheduled."""

    def __init__(self, policy: Policy) -> None:
        """Begin with nothing observed; only a policy behind a `Door` expects TTFTs."""
        self._door = policy if isinstance(policy, Door) else None
        self._expected_s: dict[str, float] = {}
        """The expected TTFT of each request that was scheduled and has no token yet."""
        self._expected = HistogramByTier(
            "slosched:ttft_expected_seconds",
            "Median TTFT that was expected when the request arrived.",
            SECONDS,
        )
        self._error = HistogramByTier(
            "slosched:ttft_error_seconds",
            "Actual minus expected TTFT; above 0 the first token came later than expected.",
            SIGNED_SECONDS,
        )
        self._slack = HistogramByTier(
            "slosched:slack_when_scheduled_seconds",
            "Time until the TTFT deadline when the request was first scheduled.",
            SIGNED_SECONDS,
        )

    def observe_scheduled(self, request: Request, start_s: float) -> float | None:
        """Count a request whose first step began at `start_s`, before its first token counts.

        Returns the TTFT that was expected when it arrived; None if none was.
        """
        if request.slo.ttft_s < math.inf:
            due_s = request.arrival_s + request.slo.ttft_s
            self._slack.observe(request.tier, due_s - start_s)
        if self._door is None:
            return None
        expected_s = self._door.expected_ttft_s(request.request_id)
        if expected_s is not None:
            self._expected_s[request.request_id] = expected_s
        return expected_s

    def observe_first_token(self, request: Request) -> None:
        """Compare the first token of a request with what was expected of it."""
        expected_s = self._expected_s.pop(request.request_id, None)
        if expected_s is not None:
            actual_s = request.token_times_s[0] - request.arrival_s
            self._expected.observe(request.tier, expected_s)
            self._error.observe(request.tier, actual_s - expected_s)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has ended."""
        self._expected_s.pop(request_id, None)

    def lines(self, label: str) -> Iterator[str]:
        for histogram in (self._expected, self._error, self._slack):
            yield from histogram.lines(label)
