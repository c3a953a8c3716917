"""A step in which decodes give way: who is due comes first, then prompts and others by deadline."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import Request, SchedulerView
from slosched.policy.kit.deferred import (
    add_due,
    add_in_time,
    add_without_preempting,
    num_in_time,
    serve_something,
)
from slosched.policy.kit.lost import lost_due_by, num_lost
from slosched.policy.kit.prompt_pack import PromptPack
from slosched.policy.kit.punctual import Order


def are_all_due_in_time(
    batch: BatchBuilder, decodes: Sequence[Request], view: SchedulerView
) -> bool:
    """Tell whether an empty step has time for all decodes that are due within its time limit.

    `decodes` are sorted by deadline.
    """
    end_s = view.now_s + batch.time_limit_s
    due = decodes[: bisect_right(decodes, end_s, key=attrgetter("deadline_s"))]
    return num_in_time(batch, due) == len(due)


def give_way(
    pack: PromptPack, decodes: Sequence[Request], order: Order, view: SchedulerView, due_s: float
) -> None:
    """Fill the step of `pack` with `decodes`, which are sorted by deadline, and prompts.

    The decodes that are due by `due_s` come first, then the punctual prompts of `order` and the
    other decodes by deadline, then the late prompts.  Lost decodes get a token now and then.
    """
    batch, num = pack.batch, num_lost(decodes, view)
    lost, kept = decodes[:num], decodes[num:]
    at = add_due(batch, kept, 0, due_s)
    pack.reserved_blocks += len(decodes) - at
    if not at or kept[at - 1] in batch:  # All that are due found time.
        add_in_time(batch, lost_due_by(lost, kept, due_s))
        _merge(kept[at:], order, pack)
        add_in_time(batch, [r for r in lost if r not in batch])
    if not batch.num_scheduled_tokens:
        serve_something(batch, decodes)


def serve_all_decodes(pack: PromptPack, decodes: Sequence[Request], order: Order) -> None:
    """Fill the step of `pack` with all decodes, then with the punctual and the late prompts."""
    add_without_preempting(pack.batch, decodes)
    pack.add(order.in_time)
    pack.add(order.late)
    if not pack.batch.num_scheduled_tokens:
        serve_something(pack.batch, decodes)


def _merge(decodes: Sequence[Request], order: Order, pack: PromptPack) -> None:
    """Add punctual prompts and `decodes` by deadline, then the late prompts."""
    at = 0
    for prompt in order.in_time:
        at = add_due(pack.batch, decodes, at, prompt.deadline_s)
        if not pack.add((prompt,)):
            return
    add_due(pack.batch, decodes, at, math.inf)
    pack.add(order.late)
