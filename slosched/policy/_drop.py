"""Giving up on requests that can no longer make it: an option of every baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

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
    for request in (*view.waiting, *view.running, *view.swapped):
        if request.num_output_tokens == 0:
            reason = late_reason(request, view, drop)
            if reason is not None:
                batch.reject(request, reason)
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


def late_reason(request: Request, view: SchedulerView, drop: Drop) -> EndReason | None:
    slack_s = request.deadline_s - view.now_s
    if slack_s < 0:
        return EndReason.EXPIRED
    if drop == Drop.EXPIRED:
        return None
    if view.latency_model is None:
        raise ValueError("drop='infeasible' predicts times: give the scheduler a latency model")
    needed_s = view.latency_model.predict_prefill(
        request.num_uncomputed_tokens, request.num_computed_tokens
    )
    return EndReason.INFEASIBLE if needed_s > slack_s else None
