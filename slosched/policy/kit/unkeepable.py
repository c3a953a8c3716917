"""Prompts whose TPOT is not kept: they would be late however early they start.

Those whose TPOT the device can never keep are rejected, the others go last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from slosched.core import DeadlineRule, Request, SchedulerView
from slosched.policy.kit.crowd import step_s
from slosched.policy.kit.punctual import Order, Timed


class Kept(NamedTuple):
    """The smallest TPOT that steps keep."""

    tpot_s: float = 0.0
    """It is 0 if every TPOT is kept that the device can keep at all."""
    spare: float = 0.0
    """What a request has for each token beyond its TPOT, as a share of its TTFT."""

    def includes(self, tpot_s: float, ttft_s: float) -> bool:
        """Tell whether a request with these promises can be in time.

        Without a promise for its first token (`ttft_s` is infinite) its TPOT alone counts, unless
        there is something to `spare`.
        """
        return (tpot_s + self.spare * ttft_s if self.spare else tpot_s) >= self.tpot_s


def unkeepable(requests: Sequence[Request], view: SchedulerView) -> list[Request]:
    """Return the requests whose TPOT is below a step of one decode alone: no step is shorter.

    Under the rule `envelope` there are none, since what is left of a TTFT makes up for a TPOT.  Who
    asks for one token alone has no time per token to keep.  O(n), with one prediction.
    """
    if not requests or view.limits.deadline_rule is DeadlineRule.ENVELOPE:
        return []
    alone_s = step_s(1, 1, view.model)
    return [r for r in requests if r.slo.tpot_s < alone_s and r.max_tokens > 1]


def split_unkeepable(
    prompts: Sequence[Timed], view: SchedulerView, kept: Kept
) -> tuple[Sequence[Timed], list[Request]]:
    """Return the prompts whose TPOT is `kept`, and the others.

    None is kept that is below a step of one decode alone, since no step is shorter.  Who asks for
    one token alone has no time per token to keep.  O(n), with one prediction.
    """
    alone_s, (kept_s, spare) = step_s(1, 1, view.model), kept
    # Written out, since hundreds may wait.  Of an infinite TTFT, nothing is not a number.
    late = [
        r
        for r, _ in prompts
        if (
            (tpot_s := r.slo.tpot_s) < alone_s
            or (tpot_s + spare * r.slo.ttft_s if spare else tpot_s) < kept_s
        )
        and r.max_tokens > 1
    ]
    if not late:
        return prompts, []
    ids = {r.request_id for r in late}
    return [timed for timed in prompts if timed[0].request_id not in ids], late


def behind_others(order: Order, unkeepable: Sequence[Request]) -> Order:
    """Return the order with `unkeepable` behind the late prompts."""
    return order._replace(late=[*order.late, *unkeepable]) if unkeepable else order
