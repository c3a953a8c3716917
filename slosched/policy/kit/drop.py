"""Rejecting requests that can no longer meet their TTFT: an option of every baseline."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from enum import StrEnum
from itertools import chain

from slosched.batch import BatchBuilder
from slosched.core import (
    EndReason,
    LatencyModel,
    Request,
    SchedulerView,
)
from slosched.policy.kit.remaining import Remaining


class Drop(StrEnum):
    """The requests that are rejected before they have emitted a token."""

    NEVER = "never"
    EXPIRED = "expired"
    """Requests whose TTFT deadline has passed."""
    INFEASIBLE = "infeasible"
    """Also requests that would miss it even if the device computed nothing else from now on."""


def drop_late(batch: BatchBuilder, view: SchedulerView, drop: Drop) -> SchedulerView:
    """Reject the requests that `drop` names; return the view without them."""
    if drop == Drop.NEVER:
        return view
    requests = chain(view.waiting, view.running, view.swapped)
    if drop == Drop.EXPIRED:
        reject_expired(batch, requests, view.now_s)
    else:
        silent = [r for r in requests if not r.num_output_tokens]
        reject_hopeless(batch, view.model, silent, view.now_s)
    return without_rejected(batch, view)


def reject_expired(batch: BatchBuilder, requests: Iterable[Request], now_s: float) -> None:
    """Reject the requests without a token whose TTFT deadline has passed."""
    for request in [r for r in requests if r.deadline_s < now_s and not r.num_output_tokens]:
        batch.reject(request, EndReason.EXPIRED)


def reject_hopeless(
    batch: BatchBuilder, model: LatencyModel, prompts: Iterable[Request], now_s: float
) -> list[tuple[Request, float]]:
    """Reject prompts that would miss their TTFT even alone on the device; return the others.

    Each comes with the seconds that the rest of its prefill takes alone.  A request that has
    emitted a token is never rejected.
    """
    predict = model.predict_prefill
    timed = []
    for request in prompts:
        out, computed = request.num_output_tokens, request.num_computed_tokens
        alone_s = predict(request.num_prompt_tokens + out - computed, computed)
        if alone_s <= request.deadline_s - now_s or out:
            timed.append((request, alone_s))
        else:
            batch.reject(request, why_late(request, now_s))
    return timed


def why_late(request: Request, now_s: float) -> EndReason:
    """Return the reason to reject a request that cannot meet its TTFT.

    It is EXPIRED if the deadline has passed, and INFEASIBLE if it is still to come.
    """
    return EndReason.EXPIRED if request.deadline_s - now_s < 0 else EndReason.INFEASIBLE


def without_rejected(batch: BatchBuilder, view: SchedulerView) -> SchedulerView:
    """Return the view without the requests that the step rejects."""
    if not batch.rejected:
        return view
    if batch.rejected_waiting:
        view = replace(view, waiting=Remaining(view.waiting, batch.rejected_waiting.copy()))
    if len(batch.rejected_waiting) == len(batch.rejected):
        return view
    running, swapped = (
        tuple([r for r in requests if r.request_id not in batch.rejected])
        for requests in (view.running, view.swapped)
    )
    return replace(view, running=running, swapped=swapped)
