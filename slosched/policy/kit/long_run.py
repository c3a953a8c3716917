"""Prompts that are too long to be served if more arrive than there is time for, and go on to."""

from __future__ import annotations

import math

from slosched.core import RequestStatus, SchedulerView
from slosched.policy.kit.arrivals import Arrivals, num_through
from slosched.policy.kit.pace import Pace
from slosched.policy.kit.punctual import Order
from slosched.policy.kit.unkeepable import Kept

_STALE = 1 / 16
"""Share of the latest requests that have to be new, or of the time in which they came that has to
pass, before the answer is looked for anew: that takes some tenths of a millisecond."""
_LEAST_SERVED = 16
"""Latest requests to be served, at least, that tell which lengths come."""
_MOST_TRIED = 4
"""Mean prompts for which the speed of the device is asked."""


class LongRun:
    """Tells which prompts are too long for what arrives in the long run, and puts them last.

    If more prompts arrive than the device has time for, the most requests are good if it serves
    the shortest of them.  Who plans the prompts that wait now, and no others, gives up those that
    are longest for the time that is left, and serves a long one as soon as there is a gap for it,
    although it takes the place of several short ones that have yet to come.  All the others then
    wait until they are due, and have no time to spare.

    The arrivals of a longer time tell which lengths come.  The shortest go through, for which the
    device has time if as many requests end as start (`Steady`): at the TPOT that steps keep
    now, and with prompts as long as the mean of these.  So it is asked for all of them first, then
    for those that go through at that speed, and so on.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._fresh_until_seen = 0
        self._fresh_until_s = -math.inf
        self._most_tokens = math.inf

    def long_last(self, order: Order, pace: Pace, view: SchedulerView, kept: Kept) -> Order:
        """Return the order with the prompts that are too long behind the others in time.

        Those that have begun, or were preempted, stay in their places.
        """
        most_tokens = self.most_tokens(pace, view, kept)
        if most_tokens == math.inf:
            return order
        too_long = {
            r.request_id
            for r in order.in_time
            if r.num_uncomputed_tokens > most_tokens
            and r.status is RequestStatus.WAITING
            and not r.num_preemptions
        }
        if not too_long:
            return order
        return Order(
            [r for r in order.in_time if r.request_id not in too_long],
            [*(r for r in order.in_time if r.request_id in too_long), *order.late],
        )

    def most_tokens(self, pace: Pace, view: SchedulerView, kept: Kept) -> float:
        """Return the tokens of the longest prompt for which there is time; infinite if for all.

        Best effort goes last and takes no time, and so does who asks for a TPOT that is not `kept`,
        unless something is left of a TTFT that makes up for it.  The answer is looked for anew
        when some requests have arrived, or none has for a while.
        """
        arrivals, now_s = self._arrivals, view.now_s
        num_known = len(arrivals.longer)
        if arrivals.num_seen >= self._fresh_until_seen or now_s >= self._fresh_until_s:
            span_s = now_s - arrivals.longer[0].arrival_s if num_known else 0.0
            self._fresh_until_s = now_s + _STALE * span_s
            self._fresh_until_seen = arrivals.num_seen + max(1, round(_STALE * num_known))
            self._most_tokens = self._longest(pace, view, kept, span_s)
        return self._most_tokens

    def _longest(self, pace: Pace, view: SchedulerView, kept: Kept, span_s: float) -> float:
        served = [
            a
            for a in self._arrivals.longer
            if not a.is_best_effort and (kept.spare or kept.includes(a.tpot_s, a.ttft_s))
        ]
        if len(served) < _LEAST_SERVED or span_s <= 0:
            return math.inf
        tpot_s = pace.tpot_s if pace.tpot_s < math.inf else min(a.tpot_s for a in served)
        lengths = sorted([a.num_tokens for a in served])
        num = len(lengths)
        for _ in range(_MOST_TRIED):
            steady = self._arrivals.steady(view, sum(lengths[:num]) / num)
            if steady is None:
                return math.inf
            before, num = num, num_through(lengths, steady.tokens_per_s(tpot_s) * span_s)
            if num == len(lengths):
                return math.inf
            num = max(1, num)
            if num == before:
                break
        return lengths[num - 1]
