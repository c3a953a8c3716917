"""Requests that are refused on arrival, before they wait."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from slosched.core.plan import Policy
from slosched.core.request import DeadlineRule, EndReason, Request
from slosched.core.shape import LatencyModel


class Refusal(NamedTuple):
    """The answer to a request that is refused on arrival."""

    reason: EndReason
    promise: str
    """The part of the SLO that would not be kept: "TTFT" or "TPOT"."""
    expected_s: float
    """The time that is expected instead."""
    promised_s: float
    retry_after_s: float | None
    """Seconds after which the same request may be in time; None if it never will be here."""


class Doorkeeper(Policy):
    """A policy that judges each request when it arrives, also in the middle of a step.

    A policy without this base class sees new requests when the next step is planned.
    """

    @abstractmethod
    def judge(self, request: Request, model: LatencyModel, rule: DeadlineRule) -> Refusal | None:
        """Return why a new request is refused, or None to let it wait.

        `rule` is the one by which requests are judged to be in time.

        It is asked once for each request.  Another thread may ask while a step is planned.
        """
