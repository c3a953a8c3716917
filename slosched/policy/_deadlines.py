"""When a token is due, for policies whose paper has a deadline rule of its own."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from operator import attrgetter

from slosched.core import DeadlineRule, Request


class Deadlines(StrEnum):
    """Which due times a policy reckons with, whatever it is judged by."""

    RUN = "run"
    """Those of the run's `DeadlineRule`, by which it is judged."""
    ENVELOPE = "envelope"
    """Token i at arrival + TTFT + i * TPOT, however early or late those before it were."""
    TBT = "tbt"
    """Each token a TPOT after the one before."""

    @property
    def due_s(self) -> Callable[[Request], float]:
        """When the next token of a request is due."""
        return _DUE_S[self]


_DUE_S: dict[Deadlines, Callable[[Request], float]] = {
    Deadlines.RUN: attrgetter("deadline_s"),
    Deadlines.ENVELOPE: DeadlineRule.ENVELOPE.next_deadline_s,
    Deadlines.TBT: DeadlineRule.TBT.next_deadline_s,
}
