"""Due times of tokens, for policies whose paper has a deadline rule of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from slosched.core import DeadlineRule, Request


class Deadlines(StrEnum):
    """The rule by which a policy computes due times; results are judged by the run's rule."""

    RUN = "run"
    """Due times of the run's `DeadlineRule`, by which results are judged."""
    ENVELOPE = "envelope"
    """Token i is due at arrival + TTFT + i * TPOT, however early or late earlier ones came."""
    TBT = "tbt"
    """Each token is due one TPOT after the token before it."""

    def due_s(self, requests: Iterable[Request]) -> list[float]:
        """Return when the next token of each request is due; for a first token all rules agree."""
        if self is Deadlines.RUN:
            return [r.deadline_s for r in requests]
        rule_s = _envelope_s if self is Deadlines.ENVELOPE else DeadlineRule.TBT.next_deadline_s
        return [rule_s(r) if r.num_output_tokens else r.deadline_s for r in requests]

    def in_order(self, requests: Sequence[Request]) -> tuple[list[Request], list[float]]:
        """Return the requests sorted by due time, and their due times."""
        due_s = self.due_s(requests)
        places = sorted(range(len(due_s)), key=due_s.__getitem__)
        return [requests[i] for i in places], [due_s[i] for i in places]


def _envelope_s(request: Request) -> float:
    """Return `DeadlineRule.ENVELOPE.next_deadline_s`, computed in half the time.

    Every step asks it for hundreds of requests.
    """
    slo = request.slo
    return request.arrival_s + slo.ttft_s + request.num_output_tokens * slo.tpot_s
