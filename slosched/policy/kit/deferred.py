"""Steps that serve some decodes and let others wait."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter

from slosched.batch import BatchBuilder, largest_that_fits
from slosched.core import DecodeGroup, Request, SchedulerView, group_shape


def num_in_time(batch: BatchBuilder, decodes: Sequence[Request]) -> int:
    """Return how many of `decodes`, from the first on, tokens and time still allow.

    Adds nothing to the step.  One prediction if all of them fit, O(log n) predictions if not.
    """
    most = max(0, min(len(decodes), batch.num_free_tokens))
    if batch.time_limit_s == math.inf or not most:
        return most
    contexts = [r.num_computed_tokens + 1 for r in decodes]

    def fits(num: int) -> bool:
        return batch.predict_with_decodes(contexts[:num]) < batch.time_limit_s

    return most if fits(most) else largest_that_fits(fits, 0, most)


def add_without_preempting(batch: BatchBuilder, decodes: Sequence[Request]) -> None:
    """Add a token of each decode for which there is a KV block."""
    if batch.num_free_blocks >= len(decodes):
        batch.add_preempting(decodes, victims=[])
        return
    for request in decodes:
        batch.add(request)


def add_in_time(batch: BatchBuilder, decodes: Sequence[Request]) -> None:
    """Add a token of as many of `decodes`, from the first on, as time, tokens and blocks allow."""
    add_without_preempting(batch, decodes[: num_in_time(batch, decodes)])


def add_due(batch: BatchBuilder, decodes: Sequence[Request], first: int, until_s: float) -> int:
    """Add the decodes from place `first` on that are due by `until_s`, as far as time allows.

    `decodes` are sorted by deadline.  Returns the place of the first one that is due later.
    """
    end = bisect_right(decodes, until_s, lo=first, key=attrgetter("deadline_s"))
    if end > first:
        add_in_time(batch, decodes[first:end])
    return end


def serve_something(
    batch: BatchBuilder, running: Sequence[Request], others: Iterable[Request] = ()
) -> None:
    """Serve `running` in its order although nothing can be in time; else start one of `others`."""
    batch.time_limit_s = math.inf
    left = [r for r in running if not batch.has_left(r)]
    batch.add_preempting(left, victims=list(left))
    for request in others:
        if batch.num_scheduled_tokens:
            break
        batch.admit(request)


def are_alone(decodes: DecodeGroup, view: SchedulerView, token_budget: float = math.inf) -> bool:
    """Tell whether there are only `decodes`, and tokens suffice for all of them."""
    most = min(token_budget, view.limits.max_num_batched_tokens)
    return not view.running and not view.waiting and decodes.num_decodes <= most


def all_in_time(decodes: DecodeGroup, view: SchedulerView, limit_s: float) -> bool:
    """Tell whether a step of `decodes` alone is predicted to take less than `limit_s`."""
    if limit_s == math.inf:
        return True
    model = view.latency_model
    return model is not None and model.predict(group_shape(decodes)) < limit_s
