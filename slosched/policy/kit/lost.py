"""Decodes that miss their SLO whatever comes: they take no time from those that can keep theirs."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from operator import attrgetter

from slosched.core import DeadlineRule, DecodeGroup, Request, SchedulerView


def num_lost(decodes: Sequence[Request], view: SchedulerView) -> int:
    """Return how many of `decodes`, which are sorted by deadline, are lost: the first ones.

    Under the rule `envelope` a request whose token is late has missed its SLO.  The other rules
    allow for a late token.  If all are lost there is nobody to serve before them: then it is 0.
    """
    if view.limits.deadline_rule is not DeadlineRule.ENVELOPE:
        return 0
    num = bisect_left(decodes, view.now_s, key=attrgetter("deadline_s"))
    return num if num < len(decodes) else 0


def may_be_lost(decodes: DecodeGroup, view: SchedulerView) -> bool:
    """Tell whether one of `decodes` is lost, if not all are."""
    is_envelope = view.limits.deadline_rule is DeadlineRule.ENVELOPE
    return is_envelope and decodes.first_deadline_s < view.now_s


def lost_due_by(
    lost: Iterable[Request], others: Iterable[Request], until_s: float
) -> list[Request]:
    """Return the lost decodes that get a token by `until_s` although their SLO is missed.

    Each gets one as often as the largest TPOT of the `others` asks for.
    """
    every_s = max((r.slo.tpot_s for r in others), default=math.inf)
    return [r for r in lost if not r.token_times_s or r.token_times_s[-1] + every_s <= until_s]
