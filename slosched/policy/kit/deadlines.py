"""When tokens are due, for policies whose paper has a deadline rule of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from slosched.core import DeadlineRule, Request


class Deadlines(StrEnum):
    """Which due times a policy reckons with, whatever it is judged by."""

    RUN = "run"
    """Those of the run's `DeadlineRule`, by which it is judged."""
    ENVELOPE = "envelope"
    """Token i at arrival + TTFT + i * TPOT, however early or late those before it were."""
    TBT = "tbt"
    """Each token a TPOT after the one before."""

    def due_s(self, requests: Iterable[Request]) -> list[float]:
        """When the next token of each is due; until the first token all rules agree."""
        if self is Deadlines.RUN:
            return [r.deadline_s for r in requests]
        rule_s = _envelope_s if self is Deadlines.ENVELOPE else DeadlineRule.TBT.next_deadline_s
        return [rule_s(r) if r.num_output_tokens else r.deadline_s for r in requests]

    def in_order(self, requests: Sequence[Request]) -> tuple[list[Request], list[float]]:
        """The requests by when they are due, and when that is."""
        due_s = self.due_s(requests)
        places = sorted(range(len(due_s)), key=due_s.__getitem__)
        return [requests[i] for i in places], [due_s[i] for i in places]


def _envelope_s(request: Request) -> float:
    """`DeadlineRule.ENVELOPE.next_deadline_s` in half its time, for hundreds in every step."""
    slo = request.slo
    return request.arrival_s + slo.ttft_s + request.num_output_tokens * slo.tpot_s
