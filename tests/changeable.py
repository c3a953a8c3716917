"""Portfolios whose candidates take turns, to test what it takes to change over."""

from __future__ import annotations

import math

from slosched.policy.portfolio.policy import Portfolio
from slosched.policy.portfolio.question import Answer, Question
from slosched.policy.portfolio.scores import LEAST_JUDGED
from slosched.policy.spec import make_policy


class TakingTurns:
    """A forecaster in whose answers another candidate is the best every time."""

    is_busy = False

    def __init__(self) -> None:
        self._num_asked = 0
        self._answer: Answer | None = None

    def ask(self, question: Question) -> bool:
        names = (*question.candidates, *question.eliminated)
        self._num_asked += 1
        best = names[self._num_asked % len(names)]
        good = {name: (float(name == best),) * LEAST_JUDGED for name in names}
        self._answer = Answer(good, num_unjudged=0, has_turned=True)
        return True

    def take_answer(self) -> Answer | None:
        taken, self._answer = self._answer, None
        return taken


def changing_over(*candidates: str) -> Portfolio:
    """Return a portfolio that goes over to another candidate every few steps of a scenario.

    It does so from the first request on that is late.
    """
    portfolio = Portfolio(
        every_s=2.0**-6,
        delay_s=2.0**-8,
        trouble=0.0,
        effort=math.inf,
        candidates={spec: make_policy(spec) for spec in candidates},
    )
    portfolio.forecast_with(TakingTurns())
    return portfolio
