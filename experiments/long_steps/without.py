"""`goodput` as it would be without steps longer than a TPOT."""

from __future__ import annotations

from slosched.core import SchedulerView
from slosched.policy.goodput.policy import Goodput
from slosched.policy.kit import LongSteps, Pace


class WithoutLongSteps(Goodput):
    """Plans steps within the smallest TPOT alone."""

    def long_steps(self, _pace: Pace, _view: SchedulerView) -> LongSteps | None:
        return None
