"""Steps longer than a TPOT in which decodes give way, since all of them are ahead by more."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from slosched.core import BatchShape, DeadlineRule, Request, SchedulerView
from slosched.policy.kit.chunks import chunks_beside, largest_within
from slosched.policy.kit.pace import Pace

_SPARE = 0.1
"""Share of the time until the first decode is due that the step leaves, as it may take longer."""
_LEAST_GAIN = 1.1
"""Factor by which prompts must go faster in full steps than in those within the usual limit."""


def limit_while_ahead_s(
    pace: Pace, decodes: Sequence[Request], view: SchedulerView, margin: float, limit_s: float
) -> float:
    """Return the time limit of a step in which `decodes`, sorted by deadline, give way.

    It is `limit_s`, which is no longer than a TPOT, or the time until the first of them is due,
    less a tenth and `margin` of its TPOT.  A TPOT is short where the constant of a step, or what it
    reads of the model's weights, takes much of it: prompts then go faster in full steps.

    Decodes whose TPOT is not kept count, too, unless they are late, since they may still keep it.
    The limit stays if a step of all decodes takes longer than it, as they then could not get ahead
    again, and under the rule `tbt`, which counts every gap between tokens.
    """
    is_strict = view.limits.deadline_rule is DeadlineRule.TBT
    if is_strict or pace.first_slack_s <= limit_s or pace.all_s > limit_s:
        return limit_s
    longer_s = _ahead_s(decodes, view.now_s, margin)
    return longer_s if longer_s > limit_s and _pays(limit_s, view) else limit_s


def _ahead_s(decodes: Sequence[Request], now_s: float, margin: float) -> float:
    """Return how long a step may last before the first of `decodes` that is not late is due."""
    at = bisect_left(decodes, now_s, key=attrgetter("deadline_s"))
    if at == len(decodes):
        return math.inf
    first = decodes[at]
    return (1 - _SPARE) * (first.deadline_s - now_s) - margin * first.slo.tpot_s


def _pays(limit_s: float, view: SchedulerView) -> bool:
    """Tell whether prompts alone go faster in full steps than in steps that last `limit_s`."""
    chunks = chunks_beside(view.model, BatchShape(), 0.0, view.limits.max_num_batched_tokens)
    within, full = largest_within(chunks, 0.0, limit_s), chunks[-1]
    if within is None:
        return True
    return full.num_tokens / full.step_s >= _LEAST_GAIN * within.num_tokens / within.step_s
