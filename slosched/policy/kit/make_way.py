"""Requests whose tokens are not due for long make way for those that are due soon."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from slosched.batch import BatchBuilder
from slosched.core import (
    DecodeGroup,
    KVView,
    PreemptionMode,
    Request,
    RequestStatus,
    SchedulerView,
    due_by,
    longest_tokens,
)

_RUNNING = RequestStatus.RUNNING
"""A local name, because each attribute look-up on an enum takes 0.1 µs in Python 3.11."""

FAR_S = 60.0
"""Time from now after which a token is due so late that its request goes behind all others."""
_MOST_ROOM = 0.75
"""The share of the KV cache that is room enough for any request to come back."""
_PATIENCE = 2.0
"""How much longer than to compute it anew a request must have, so that it can make way."""


def make_way(batch: BatchBuilder, view: SchedulerView, prompts: Iterable[Request]) -> bool:
    """Preempt requests that can wait where prompts that may start lack a seat or KV blocks.

    `prompts` are sorted by deadline; as many may start as the step has tokens for.  Only for those
    that are not late yet is anything preempted: a late one need not be the next to start, and for
    its sake two that can wait could preempt each other without an end.  Those that can wait are
    best effort, or due in more than a minute; the youngest goes first.  If all of them would not
    leave enough for a prompt, none is preempted for it.  None is swapped out, since what is swapped
    out comes back before any prompt starts.  Returns whether any was preempted.  Call it before
    anything is added to the step.
    """
    patient = _patient(view)
    if not patient:  # Nearly always, and hundreds of prompts may wait.
        return False
    starting, begun = _starting(prompts, view)
    if _have_room(batch, starting, begun):
        return False
    num_blocks, num_seats = batch.blocks_kept_free(starting[0]), 0
    for request in starting:
        if _can_wait(request, view):
            break
        if request.deadline_s <= view.now_s:
            continue
        wanted = num_blocks + batch.blocks_missing_at_most(request), num_seats + 1
        if _is_made(*wanted, batch, view, patient, begun):
            num_blocks, num_seats = wanted
    return bool(batch.preempted)


def come_back(waiting: Iterable[Request], kv: KVView) -> list[Request]:
    """Return the requests without those that would only have to make way again.

    Best effort that has made way n times has room again where blocks for n + 1 like it are free, or
    three quarters of the cache.  Else it would be computed anew again and again, for nothing.
    """
    return [
        request
        for request in waiting
        if not (request.num_preemptions and request.is_best_effort) or _has_room(request, kv)
    ]


def _has_room(request: Request, kv: KVView) -> bool:
    num_blocks = -(-request.num_tokens // kv.block_size)
    wanted = min((request.num_preemptions + 1) * num_blocks, _MOST_ROOM * kv.num_blocks)
    return kv.num_free_blocks >= max(wanted, num_blocks)


def with_way_made(batch: BatchBuilder, view: SchedulerView) -> SchedulerView:
    """Preempt as `make_way` does, for all prompts by deadline; return the view without these."""
    if not view.waiting or not _patient(view):  # Do not sort a thousand prompts for nothing.
        return view
    if not make_way(batch, view, _prompts(view)):
        return view
    return replace(view, running=tuple([r for r in view.running if not batch.has_left(r)]))


def has_to_make_way(
    batch: BatchBuilder,
    decodes: DecodeGroup,
    view: SchedulerView,
    prompts: Iterable[Request] | None = None,
) -> bool:
    """Tell whether `make_way` may preempt a request, which may be one of `decodes` beside the view.

    `prompts` are those that may start and those that have begun, in the order in which `make_way`
    gets them.  Default: all in the view, by deadline.
    """
    if not view.waiting or not may_make_way(batch, decodes, view, _longest_s(view)):
        return False  # Nearly always, before a thousand prompts are sorted or counted.
    starting, begun = _starting(_prompts(view) if prompts is None else prompts, view)
    return not _have_room(batch, starting, begun)


def may_make_way(
    batch: BatchBuilder, decodes: DecodeGroup, view: SchedulerView, longest_s: float
) -> bool:
    """Tell whether a running request may be such as can wait, for a waiting prompt that cannot.

    It may be one of `decodes` beside the view.  Of the prompts that wait the longest takes
    `longest_s` alone; those that the step rejects do not count.
    """
    now_s = view.now_s
    is_far = decodes.last_deadline_s - now_s >= FAR_S
    if not (is_far or True in decodes.num_by(_is_eased) or _patient(view)):
        return False
    until_s = now_s + max(FAR_S, _PATIENCE * longest_s)
    urgent = due_by(view.waiting, until_s)
    return any(r.deadline_s > now_s and not batch.has_left(r) for r in urgent)


def _longest_s(view: SchedulerView) -> float:
    """Return the time that the longest waiting prompt takes alone; infinite without a model."""
    if view.latency_model is None:
        return math.inf
    return view.latency_model.predict_prefill(longest_tokens(view.waiting))


def _is_eased(request: Request) -> bool:
    return request.asked_slo is not None


def _prompts(view: SchedulerView) -> list[Request]:
    """Return the prompts that have begun and those that wait, by deadline."""
    begun = [request for request in view.running if not request.is_decode]
    return sorted(chain(begun, view.waiting), key=attrgetter("deadline_s"))


def _is_made(
    num_blocks: int,
    num_seats: int,
    batch: BatchBuilder,
    view: SchedulerView,
    patient: Sequence[Request],
    begun: Sequence[Request],
) -> bool:
    """Preempt what can wait until so much is free; return False if it never is."""
    if _fit(batch, num_blocks, num_seats, begun):
        return True
    victims = [request for request in patient if not batch.has_left(request)]
    held = sum([view.kv.num_held_blocks(victim.request_id) for victim in victims])
    held += batch.blocks_promised(victims)
    if not _fit(batch, num_blocks - held, num_seats - len(victims), begun):
        return False
    while victims and not _fit(batch, num_blocks, num_seats, begun):
        batch.preempt(victims.pop(), PreemptionMode.RECOMPUTE)
    return _fit(batch, num_blocks, num_seats, begun)


def _starting(
    prompts: Iterable[Request], view: SchedulerView
) -> tuple[list[Request], list[Request]]:
    """Return the prompts for which the step has tokens to start them, and those that have begun."""
    starting: list[Request] = []
    begun: list[Request] = []
    num_left = view.limits.max_num_batched_tokens
    for request in prompts:
        if request.status is _RUNNING:
            begun.append(request)
        elif num_left > 0:
            starting.append(request)
            known = request.num_prompt_tokens + request.num_output_tokens
            num_left -= known - request.num_computed_tokens
    return starting, begun


def _have_room(batch: BatchBuilder, starting: Sequence[Request], begun: Iterable[Request]) -> bool:
    """Tell whether there are seats and KV blocks for all of `starting`."""
    if not starting:
        return True
    if len(starting) > batch.num_free_seqs:  # Hundreds may wait for a seat: count no blocks.
        return False
    num_blocks = sum([batch.blocks_missing_at_most(request) for request in starting])
    num_blocks += batch.blocks_kept_free(starting[0])
    return _fit(batch, num_blocks, len(starting), begun)


def _fit(batch: BatchBuilder, num_blocks: int, num_seats: int, begun: Iterable[Request]) -> bool:
    """Tell whether so many blocks and seats are free, beside what `begun` prompts will need."""
    if num_seats > batch.num_free_seqs:
        return False
    return num_blocks + batch.blocks_promised(begun) <= batch.num_free_blocks


def _patient(view: SchedulerView) -> list[Request]:
    """Return the running requests that can wait."""
    now_s = view.now_s
    # Hundreds run, and nearly all are due soon: a closer look is for the others alone.
    return [
        request
        for request in view.running
        if (request.deadline_s - now_s >= FAR_S or request.asked_slo is not None)
        and _can_wait(request, view)
    ]


def _can_wait(request: Request, view: SchedulerView) -> bool:
    """Tell whether a request may be computed anew later without breaking a promise.

    Without a latency model it is not known of one that has a promise.
    """
    if request.is_best_effort:
        return True
    slack_s = request.deadline_s - view.now_s
    if slack_s < FAR_S or view.latency_model is None:
        return False
    return slack_s > _PATIENCE * view.model.predict_prefill(request.num_tokens)
