"""Decodes that are ahead of their deadlines lend their KV blocks until they are due.

A decode that runs faster than its TPOT asks for gets ahead.  While it is ahead it can be preempted
and computed anew later, and no token of it is late.  So where blocks are short, the decode that is
furthest ahead is the one to preempt, and it waits behind prompts until it is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from slosched.core import DeadlineRule, Request, SchedulerView
from slosched.policy.kit.lost import num_lost
from slosched.policy.kit.memory import tokens_freed
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.punctual import Order, Timed, shortest_first

_NUM_STEPS = 8
"""Steps of all decodes for which a paused request may wait for blocks once it is due."""
_PATIENCE = 2.0
"""How much longer than to compute it anew a paused request must have, so that it is not yet due."""
_FLOOD = 1.5
"""Tokens of prompts, as a multiple of those that decodes free in the same time, from which on not
all prompts will find blocks.  Above 1, because a burst passes."""


def least_urgent_last(view: SchedulerView) -> Sequence[Request]:
    """Return the running requests in the order in which they keep their blocks.

    The one that is due last is the first to be preempted, after those that have missed their SLO
    already.  Under `tbt` nobody gets ahead: there it is the one that was admitted last.
    """
    if view.limits.deadline_rule is DeadlineRule.TBT:
        return view.running
    urgent_first = sorted(view.running, key=attrgetter("deadline_s"))
    num = num_lost(urgent_first, view)
    return urgent_first[num:] + urgent_first[:num]


def is_flooded(tokens_per_s: float, stay_tokens: float, pace: Pace, view: SchedulerView) -> bool:
    """Tell whether more prompt tokens arrive in a second than a full cache of decodes frees."""
    return tokens_per_s * pace.all_s > _FLOOD * tokens_freed(stay_tokens, view.kv)


def tokens_per_s_beside(pace: Pace, view: SchedulerView, least_share: float) -> float:
    """Return the prompt tokens for which there is time while decodes run at the pace they ask for.

    At least `least_share` of the device counts as free.
    """
    full = view.limits.max_num_batched_tokens
    share = max(least_share, 1 - pace.all_s * pace.steps_per_s)
    return share * full / view.model.predict_prefill(full)


def in_turn_for_blocks(
    order: Order, prompts: Sequence[Timed], pace: Pace, view: SchedulerView, fairness: float
) -> list[Request]:
    """Return the prompts in the order in which they get blocks while too many want some.

    Paused requests that are due come first.  New prompts follow by length, since a short one takes
    least of what is scarce, and then the paused ones that have time.
    """
    new = [timed for timed in prompts if not timed[0].num_output_tokens]
    due: list[Request] = []
    paused: list[Request] = []
    for request, alone_s in prompts:
        if request.num_output_tokens:
            is_soon = is_due(request, alone_s, pace.all_s, view.now_s)
            (due if is_soon else paused).append(request)
    by_length = shortest_first(
        Order(_without_tokens(order.in_time), _without_tokens(order.late)), new, fairness
    )
    return [*due, *by_length.in_time, *paused, *by_length.late]


def is_due(request: Request, alone_s: float, all_s: float, now_s: float) -> bool:
    """Tell whether a paused request has to be computed anew, which takes `alone_s`, before long.

    `all_s` is the time of a step of all decodes.
    """
    return request.deadline_s - now_s < _PATIENCE * alone_s + _NUM_STEPS * all_s


def _without_tokens(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if not request.num_output_tokens]
