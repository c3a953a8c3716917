"""Prompts whose TPOT no device could keep go last: they would be late however early they start."""

from __future__ import annotations

from collections.abc import Sequence

from slosched.core import Request, SchedulerView
from slosched.policy.kit.crowd import step_s
from slosched.policy.kit.punctual import Order, Timed


def split_unkeepable(
    prompts: Sequence[Timed], view: SchedulerView
) -> tuple[Sequence[Timed], list[Request]]:
    """Return the prompts whose TPOT can be kept, and those for which a step is always too long.

    A step is never shorter than that of one decode alone.  O(n), with one prediction.
    """
    least_s = step_s(1, 1, view.model)
    unkeepable = [r for r, _ in prompts if r.slo.tpot_s < least_s]
    if not unkeepable:
        return prompts, []
    ids = {r.request_id for r in unkeepable}
    return [timed for timed in prompts if timed[0].request_id not in ids], unkeepable


def behind_others(order: Order, unkeepable: Sequence[Request]) -> Order:
    """Return the order with `unkeepable` behind the late prompts."""
    return order._replace(late=[*order.late, *unkeepable]) if unkeepable else order
