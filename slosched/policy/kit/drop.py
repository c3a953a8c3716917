"""Giving up on requests that can no longer make it: an option of every baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from itertools import chain

from slosched.batch import BatchBuilder
from slosched.core import EndReason, Request, SchedulerView


class Drop(StrEnum):
    """Which requests are rejected before they have emitted anything."""

    NEVER = "never"
    EXPIRED = "expired"
    """Those whose TTFT deadline has passed."""
    INFEASIBLE = "infeasible"
    """Those, too, whose remaining prefill alone would take them past it."""


def drop_late(batch: BatchBuilder, view: SchedulerView, drop: Drop) -> SchedulerView:
    """Reject what `drop` says; the view without what was rejected."""
    if drop == Drop.NEVER:
        return view
    predict = None
    if drop == Drop.INFEASIBLE:
        if view.latency_model is None:
            raise ValueError("drop='infeasible' predicts times: give the scheduler a latency model")
        predict = view.latency_model.predict_prefill
    now_s = view.now_s
    # A thousand may wait, and all of them are asked in every step.
    for request in chain(view.waiting, view.running, view.swapped):
        if request.num_output_tokens:
            continue
        slack_s, computed = request.deadline_s - now_s, request.num_computed_tokens
        if slack_s < 0:
            batch.reject(request, EndReason.EXPIRED)
        elif predict and predict(request.num_prompt_tokens - computed, computed) > slack_s:
            batch.reject(request, EndReason.INFEASIBLE)
    return without_rejected(batch, view)


def without_rejected(batch: BatchBuilder, view: SchedulerView) -> SchedulerView:
    if not batch.rejected:
        return view

    def remaining(requests: Sequence[Request]) -> tuple[Request, ...]:
        return tuple(r for r in requests if r.request_id not in batch.rejected)

    return replace(
        view,
        waiting=remaining(view.waiting),
        running=remaining(view.running),
        swapped=remaining(view.swapped),
    )
